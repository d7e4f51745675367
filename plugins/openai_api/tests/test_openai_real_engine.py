"""The OpenAI API on a real engine with a tiny random model."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import openai
import pytest

from ksana.engine.async_engine import AsyncEngine
from ksana.plugin.spec import PluginSpecs, create_plugin_manager
from ksana.testing.live_server import live_server
from ksana.testing.tiny_models import tiny_model
from ksana.types.config import CacheConfig, KernelConfig, KsanaConfig, ModelOptions
from ksana_openai_api import plugin

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(scope="module")
def real_client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    config = KsanaConfig(
        model=ModelOptions(model=str(tiny_model(tmp_path_factory.mktemp("model"))), served_model_name="tiny"),
        cache=CacheConfig(num_blocks=128),
        kernel=KernelConfig(threads=1),
    )
    engine = AsyncEngine.start(config, create_plugin_manager(PluginSpecs(autoload=False)))
    with live_server(engine, plugin) as url:
        yield openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    asyncio.run(engine.stop("the tests are done"))


def test_chat_streamed_and_whole_agree(real_client: openai.OpenAI) -> None:
    messages = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "What is the capital?"}]
    request = {"model": "tiny", "messages": messages, "temperature": 0, "max_tokens": 40}
    whole = real_client.chat.completions.create(**request)
    chunks = list(real_client.chat.completions.create(**request, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    # The second request finds the prompt of the first in the cache, and says so.
    assert whole.usage.prompt_tokens_details.cached_tokens == 0
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens > 0


def test_a_stop_string_ends_both_kinds_alike_and_never_leaks(real_client: openai.OpenAI) -> None:
    request = {"model": "tiny", "prompt": "The quick brown", "temperature": 0, "max_tokens": 40}
    free = real_client.completions.create(**request).choices[0].text
    stop = free[len(free) // 2 :][:3]
    expected = free[: free.index(stop)]
    whole = real_client.completions.create(**request, stop=stop).choices[0]
    assert (whole.text, whole.finish_reason) == (expected, "stop")
    chunks = list(real_client.completions.create(**request, stop=stop, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == expected
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_a_seed_gives_the_same_text_whatever_else_runs(real_client: openai.OpenAI) -> None:
    request = {"model": "tiny", "max_tokens": 16, "seed": 11, "temperature": 1.0}
    alone = real_client.completions.create(prompt="hello", **request).choices[0].text
    batch = real_client.completions.create(prompt=["other", "hello", "hello"], **request).choices
    assert [choice.text for choice in batch[1:]] == [alone, alone]


def test_responses_streamed_and_whole_agree_and_go_on_from_the_cache(real_client: openai.OpenAI) -> None:
    request = {"model": "tiny", "instructions": "Be kind.", "temperature": 0, "max_output_tokens": 24}
    question = "What is the capital of the country of which nobody speaks?"
    whole = real_client.responses.create(input=question, **request)
    deltas, last = [], None
    for event in real_client.responses.create(input=question, stream=True, **request):
        last = event
        if event.type == "response.output_text.delta":
            deltas.append(event.delta)
    assert last is not None
    assert "".join(deltas) == last.response.output_text == whole.output_text
    assert (last.response.status, last.response.usage.output_tokens) == (whole.status, whole.usage.output_tokens)
    following = real_client.responses.create(input="And?", previous_response_id=whole.id, **request)
    assert following.usage.input_tokens > whole.usage.total_tokens
    assert following.usage.input_tokens_details.cached_tokens >= whole.usage.input_tokens // 2
    kept = real_client.responses.input_items.list(following.id, order="asc").data
    assert [item.content[0].text for item in kept] == [question, whole.output_text, "And?"]


def test_a_prompt_that_is_too_long(real_client: openai.OpenAI) -> None:
    messages = [{"role": "user", "content": "word " * 600}]
    with pytest.raises(openai.BadRequestError) as caught:
        real_client.chat.completions.create(model="tiny", messages=messages)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "messages")
    with pytest.raises(openai.BadRequestError) as ids:
        real_client.completions.create(model="tiny", prompt=[512])
    assert ids.value.param == "prompt"
