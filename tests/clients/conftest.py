"""The demo model in a server process, for clients that know nothing of it: they run as their authors wrote them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import openai
import pytest


@pytest.fixture(scope="session", autouse=True)
def no_calls_home() -> Iterator[None]:
    """Clients that would fetch a price list or send a trace are told not to; and none may find a key of the user's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
        patch.setenv("LANGSMITH_TRACING", "false")
        for name in ("OPENAI_API_KEY", "OPENAI_BASE_URL", "OPENAI_API_BASE"):
            patch.delenv(name, raising=False)
        yield


@pytest.fixture(scope="session")
def server_url(serve_demo: Callable[..., AbstractContextManager[str]]) -> Iterator[str]:
    """Address of a server whose model may also call tools by itself."""
    with serve_demo("--enable-auto-tool-choice", "--tool-call-parser", "hermes") as greeting:
        yield greeting.split()[4]


@pytest.fixture(scope="session")
def base_url(server_url: str) -> str:
    """What clients call ``base_url``."""
    return f"{server_url}/v1"


@pytest.fixture(scope="session")
def client(base_url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=base_url, api_key="none", max_retries=0) as sync_client:
        yield sync_client
