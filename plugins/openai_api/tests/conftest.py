from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from ksana.testing.live_server import live_server
from ksana.testing.scripted_engine import ScriptedEngine
from ksana_openai_api import plugin


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine()


@pytest.fixture
def url(engine: ScriptedEngine) -> Iterator[str]:
    """Base URL of a running server with this plugin."""
    with live_server(engine, plugin) as base:
        yield base


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as openai_client:
        yield openai_client
