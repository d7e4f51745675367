"""The official client, synchronous and asynchronous, against a running server."""

from __future__ import annotations

import asyncio
import time

import openai
import pytest

from ksana.testing.scripted_engine import ScriptedEngine

pytestmark = pytest.mark.timeout(30)

HELLO = [{"role": "user", "content": "Hi"}]
PROMPT = b"user: Hi\n"
USAGE = {
    "prompt_tokens": len(PROMPT),
    "completion_tokens": 13,
    "total_tokens": len(PROMPT) + 13,
    "prompt_tokens_details": {"cached_tokens": 0},
}


def test_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="scripted", messages=HELLO)
    assert answer.id.startswith("chatcmpl-")
    assert (answer.object, answer.model) == ("chat.completion", "scripted")
    [choice] = answer.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", "Hello, world!", "stop")
    assert answer.usage is not None
    assert answer.usage.model_dump(exclude_none=True) == USAGE


def test_chat_length(client: openai.OpenAI) -> None:
    for limit in ({"max_tokens": 5}, {"max_completion_tokens": 5}, {"max_tokens": 99, "max_completion_tokens": 5}):
        answer = client.chat.completions.create(model="scripted", messages=HELLO, **limit)
        assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("Hello", "length")


def test_chat_stream(client: openai.OpenAI) -> None:
    chunks = list(client.chat.completions.create(model="scripted", messages=HELLO, stream=True))
    assert len({(chunk.id, chunk.created, chunk.model) for chunk in chunks}) == 1
    assert [chunk.choices[0].delta.role for chunk in chunks] == ["assistant"] + [None] * (len(chunks) - 1)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "Hello, world!"
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["stop"]
    assert all("usage" not in chunk.model_fields_set for chunk in chunks)


def test_chat_stream_with_usage(client: openai.OpenAI) -> None:
    chunks = list(
        client.chat.completions.create(
            model="scripted", messages=HELLO, stream=True, stream_options={"include_usage": True}
        )
    )
    assert all("usage" in chunk.model_fields_set and chunk.usage is None for chunk in chunks[:-1])
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.model_dump(exclude_none=True) == USAGE


def test_stream_options_without_a_wish_bring_no_usage(client: openai.OpenAI) -> None:
    chunks = list(client.chat.completions.create(model="scripted", messages=HELLO, stream=True, stream_options={}))
    assert all(chunk.choices for chunk in chunks)


def test_continuous_usage(client: openai.OpenAI) -> None:
    chunks = list(
        client.completions.create(
            model="scripted",
            prompt="hi",
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
        )
    )
    counts = [chunk.usage.completion_tokens for chunk in chunks if chunk.usage is not None]
    assert counts == [*range(1, 14), 13, 13]


def test_the_client_can_follow_a_whole_chat_stream(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(model="scripted", messages=HELLO) as stream:
        assert stream.get_final_completion().choices[0].message.content == "Hello, world!"


def test_completion(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="scripted", prompt="hi")
    assert answer.id.startswith("cmpl-")
    assert answer.object == "text_completion"
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("Hello, world!", "stop")


def test_completions_default_to_16_tokens_and_chat_to_no_limit(client: openai.OpenAI, engine: ScriptedEngine) -> None:
    client.completions.create(model="scripted", prompt="hi")
    client.chat.completions.create(model="scripted", messages=HELLO)
    assert [draft.sampling.max_tokens for draft in engine.drafts] == [16, None]


@pytest.mark.parametrize("prompt", [["a", "bc"], [[97], [98, 99]], ["a", [98, 99]]])
def test_several_prompts_are_several_choices(client: openai.OpenAI, prompt: object) -> None:
    answer = client.completions.create(model="scripted", prompt=prompt)  # type: ignore[call-overload]
    assert [(choice.index, choice.text) for choice in answer.choices] == [(0, "Hello, world!"), (1, "Hello, world!")]
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (3, 26)


def test_several_prompts_run_at_the_same_time_in_one_stream(client: openai.OpenAI) -> None:
    texts = ["", ""]
    order = []
    for chunk in client.completions.create(model="scripted", prompt=["a", "b"], stream=True):
        [choice] = chunk.choices
        texts[choice.index] += choice.text
        order.append(choice.index)
    assert texts == ["Hello, world!"] * 2
    assert order != sorted(order)


def test_token_ids_as_prompt(client: openai.OpenAI, engine: ScriptedEngine) -> None:
    client.completions.create(model="scripted", prompt=[104, 105])
    assert engine.drafts[0].prompt_token_ids == [104, 105]


def test_models(client: openai.OpenAI) -> None:
    [model] = client.models.list().data
    assert (model.id, model.object) == ("scripted", "model")
    for name in ("scripted", "scripted-model", "ksana-llm"):
        assert client.models.retrieve(name).id == name
        assert client.chat.completions.create(model=name, messages=HELLO).model == "scripted"
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("some/other")
    assert caught.value.code == "model_not_found"


def test_a_model_with_a_slash_in_its_name(client: openai.OpenAI, engine: ScriptedEngine) -> None:
    engine.served_model_name = "org/model"
    assert client.models.retrieve("org/model").id == "org/model"


def test_errors_arrive_as_the_clients_exceptions(client: openai.OpenAI, engine: ScriptedEngine) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model="scripted", messages=HELLO, temperature=-1)
    assert (bad.value.param, bad.value.type) == ("temperature", "invalid_request_error")
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model="scripted", prompt="x" * 1000)
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="other", prompt="x")
    engine.is_alive = False
    with pytest.raises(openai.InternalServerError) as dead:
        client.completions.create(model="scripted", prompt="x")
    assert dead.value.status_code == 503


def test_a_failure_before_the_first_token_is_a_status_and_a_later_one_an_event(
    client: openai.OpenAI, engine: ScriptedEngine
) -> None:
    engine.fail_after = 0
    with pytest.raises(openai.InternalServerError):
        client.chat.completions.create(model="scripted", messages=HELLO, stream=True)
    engine.fail_after = 3
    stream = client.chat.completions.create(model="scripted", messages=HELLO, stream=True)
    assert [next(stream).choices[0].delta.content for _ in range(4)] == ["", "H", "e", "l"]
    with pytest.raises(openai.APIError, match="scripted failure"):
        next(stream)


def test_one_of_several_prompts_that_is_refused_refuses_them_all(client: openai.OpenAI, engine: ScriptedEngine) -> None:
    with pytest.raises(openai.BadRequestError):
        client.completions.create(model="scripted", prompt=["a", "", "b"])
    assert set(engine.aborted) == {"r0", "r2"}
    assert engine.num_unfinished() == 0


def test_sampling_parameters_reach_the_engine(client: openai.OpenAI, engine: ScriptedEngine) -> None:
    client.chat.completions.create(
        model="scripted",
        messages=HELLO,
        temperature=0.5,
        top_p=0.9,
        seed=7,
        stop=["a", "b"],
        user="somebody",
        extra_body={
            "top_k": 3,
            "min_p": 0.1,
            "stop_token_ids": [5],
            "ignore_eos": True,
            "include_stop_str_in_output": True,
            "skip_special_tokens": False,
            "priority": -2,
            "cache_salt": "tenant",
            "chat_template_kwargs": {"enable_thinking": False},
            "unknown_to_everybody": 1,
        },
    )
    [draft] = engine.drafts
    sampling = draft.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.9, 3, 0.1)
    assert (sampling.seed, sampling.stop, sampling.stop_token_ids) == (7, ("a", "b"), (5,))
    assert (sampling.ignore_eos, sampling.include_stop_str_in_output, sampling.skip_special_tokens) == (
        True,
        True,
        False,
    )
    assert (draft.priority, draft.cache_salt) == (-2, "tenant")
    assert draft.chat_template_kwargs == {"enable_thinking": False}


def test_defaults_come_from_the_models_generation_config(client: openai.OpenAI, engine: ScriptedEngine) -> None:
    client.completions.create(model="scripted", prompt="a")
    engine.model_config.generation_defaults.update(temperature=0.6, top_k=20, top_p=0.95)
    client.completions.create(model="scripted", prompt="a")
    client.completions.create(model="scripted", prompt="a", temperature=0, top_p=1)
    values = [(d.sampling.temperature, d.sampling.top_k, d.sampling.top_p) for d in engine.drafts]
    assert values == [(1.0, 0, 1.0), (0.6, 20, 0.95), (0.0, 20, 1.0)]


def test_roles_and_text_parts(client: openai.OpenAI, engine: ScriptedEngine) -> None:
    client.chat.completions.create(
        model="scripted",
        messages=[
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]},
            {"role": "assistant", "content": "yes"},
            {"role": "tool", "content": "3", "tool_call_id": "x"},
        ],
    )
    rendered = engine.chat_template.render(engine.drafts[0].messages)
    assert rendered == "system: Be brief.\nuser: one\ntwo\nassistant: yes\ntool: 3\n"


def test_token_ids_instead_of_messages(client: openai.OpenAI, engine: ScriptedEngine) -> None:
    client.post("/chat/completions", body={"input_tokens": [1, 2]}, cast_to=object)
    assert engine.drafts[0].prompt_token_ids == [1, 2]


def test_equal_request_ids_do_not_meet(url: str, engine: ScriptedEngine) -> None:
    """vllm#10583: two requests of one id at the same time both end."""

    async def both() -> list[str | None]:
        headers = {"X-Request-Id": "the-same"}
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", default_headers=headers) as client:
            answers = await asyncio.gather(
                *(client.chat.completions.create(model="scripted", messages=HELLO) for _ in range(2))
            )
        assert [answer._request_id for answer in answers] == ["the-same"] * 2
        assert len({answer.id for answer in answers}) == 2
        return [answer.choices[0].message.content for answer in answers]

    engine.token_interval_s = 0.005
    assert asyncio.run(both()) == ["Hello, world!"] * 2


def test_the_asynchronous_client(url: str) -> None:
    async def talk() -> str:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:
            stream = await client.chat.completions.create(model="scripted", messages=HELLO, stream=True)
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    assert asyncio.run(talk()) == "Hello, world!"


@pytest.mark.parametrize("prompt", ["a", ["a", "b"]])
def test_a_client_that_closes_its_stream_aborts_the_requests(
    client: openai.OpenAI, engine: ScriptedEngine, prompt: str | list[str]
) -> None:
    engine.answer = "x" * 200
    engine.token_interval_s = 0.01
    stream = client.completions.create(model="scripted", prompt=prompt, stream=True, max_tokens=200)
    next(iter(stream))
    stream.close()
    while engine.num_unfinished():
        time.sleep(0.005)
    assert len(engine.aborted) == len(prompt)


def test_beam_search_has_as_many_beams_as_answers(client: openai.OpenAI, engine: ScriptedEngine) -> None:
    """One beam is greedy; ``best_of`` says that more are kept than returned."""
    for fields, num_beams, n in (
        ({"n": 3, "extra_body": {"use_beam_search": True, "length_penalty": 0.5, "early_stopping": True}}, 3, 3),
        ({"n": 2, "best_of": 4, "extra_body": {"use_beam_search": True, "length_penalty": 0.5}}, 4, 2),
        ({"extra_body": {"use_beam_search": True, "length_penalty": 0.5}}, 1, 1),
    ):
        answer = client.completions.create(model="scripted", prompt="hi", **fields)
        sampling = engine.drafts[-1].sampling
        assert (sampling.num_beams, sampling.n, sampling.length_penalty) == (num_beams, n, 0.5)
        assert sampling.is_greedy
        assert len(answer.choices) == n
