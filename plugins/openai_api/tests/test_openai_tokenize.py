"""``/tokenize`` and ``/detokenize`` on a real tokenizer."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import httpx2 as httpx
import pytest

from ksana.engine.async_engine import AsyncEngine
from ksana.plugin.spec import PluginSpecs, create_plugin_manager
from ksana.testing.live_server import live_server
from ksana.testing.tiny_models import tiny_model
from ksana.types.config import CacheConfig, KernelConfig, KsanaConfig, ModelOptions
from ksana_openai_api import plugin

pytestmark = pytest.mark.timeout(60)

TEXT = "The quick brown fox, ünder 我们!"
MESSAGES = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AsyncEngine]:
    config = KsanaConfig(
        model=ModelOptions(model=str(tiny_model(tmp_path_factory.mktemp("model"))), served_model_name="tiny"),
        cache=CacheConfig(num_blocks=64),
        kernel=KernelConfig(threads=1),
    )
    started = AsyncEngine.start(config, create_plugin_manager(PluginSpecs(autoload=False)))
    yield started
    asyncio.run(started.stop("the tests are done"))


@pytest.fixture(scope="module")
def http(engine: AsyncEngine) -> Iterator[httpx.Client]:
    with live_server(engine, plugin) as url, httpx.Client(base_url=url) as client:
        yield client


def post(http: httpx.Client, path: str, **body: Any) -> dict[str, Any]:
    response = http.post(path, json=body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


@pytest.mark.parametrize("prefix", ["", "/v1"])
@pytest.mark.parametrize("text", ["", TEXT, TEXT * 200])
def test_text_becomes_tokens_and_text_again(http: httpx.Client, engine: AsyncEngine, prefix: str, text: str) -> None:
    answer = post(http, f"{prefix}/tokenize", model="tiny", prompt=text)
    assert answer == {
        "count": len(answer["tokens"]),
        "max_model_len": engine.max_model_len,
        "tokens": engine.tokenizer.encode(text),
        "token_strs": None,
    }
    tokens = post(http, f"{prefix}/tokenize", prompt=text, add_special_tokens=False)["tokens"]
    assert post(http, f"{prefix}/detokenize", tokens=tokens) == {"prompt": text}


def test_strings_of_tokens_are_parts_of_the_text(http: httpx.Client) -> None:
    answer = post(http, "/tokenize", prompt="The quick brown fox", add_special_tokens=False, return_token_strs=True)
    assert len(answer["token_strs"]) == answer["count"] > 1
    assert "".join(answer["token_strs"]) == "The quick brown fox"


def test_messages_are_rendered_as_for_a_chat(http: httpx.Client, engine: AsyncEngine) -> None:
    assert engine.chat_template is not None
    for add in (True, False):
        rendered = engine.chat_template.render(MESSAGES, add_generation_prompt=add)
        answer = post(http, "/tokenize", messages=MESSAGES, add_generation_prompt=add)
        # The template writes the special tokens: none may come twice.
        assert answer["tokens"] == engine.tokenizer.encode(rendered, add_special_tokens=False)


def test_a_chat_of_that_many_tokens_is_charged_for_them(http: httpx.Client) -> None:
    counted = post(http, "/tokenize", messages=MESSAGES)["count"]
    answer = post(http, "/v1/chat/completions", messages=MESSAGES, max_tokens=1)
    assert answer["usage"]["prompt_tokens"] == counted


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": MESSAGES}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"messages": [{"content": "no role"}]}, "messages[0].role"),
        ("/tokenize", {"prompt": 7}, "prompt"),
        ("/tokenize", {"prompt": "a", "model": "other"}, "model"),
        ("/tokenize", {"messages": MESSAGES, "chat_template": "{{ 1 }}"}, "chat_template"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [1, -1]}, "tokens[1]"),
        ("/detokenize", {"tokens": [10**9]}, "tokens[0]"),
        ("/detokenize", {"tokens": [2**70]}, "tokens[0]"),
        ("/detokenize", {"tokens": ["1"]}, "tokens[0]"),
        ("/detokenize", {"tokens": [True]}, "tokens[0]"),
    ],
)
def test_a_wrong_field_is_named(http: httpx.Client, path: str, body: dict[str, Any], param: str) -> None:
    response = http.post(path, json=body)
    assert response.status_code in (400, 404)
    assert response.json()["error"]["param"] == param
