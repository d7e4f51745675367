"""POST /generate keeps the wire format of the original engine."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import aiohttp
import numpy as np
import pytest

from ksana.errors import RequestError
from ksana.testing.scripted_engine import ScriptedEngine
from ksana.types.grammar import GrammarSpec
from ksana.types.request import RequestDraft
from ksana.types.sampling import SamplingParams

pytestmark = pytest.mark.anyio


async def generate(session: aiohttp.ClientSession, body: dict[str, Any]) -> tuple[int, Any]:
    async with session.post("/generate", json={"stream": False, **body}) as response:
        return response.status, await response.json()


async def draft_for(serving, engine: ScriptedEngine, body: dict[str, Any]) -> RequestDraft:
    async with serving(engine) as session:
        status, answer = await generate(session, body)
        assert status == 200, answer
    return engine.drafts[-1]


async def test_whole_answer(serving, engine: ScriptedEngine) -> None:
    async with serving(engine) as session:
        assert await generate(session, {"prompt": "hi"}) == (
            200,
            {
                "texts": ["Hello, world!"],
                "output_token_ids": [list(b"Hello, world!")],
                "logprobs": [],
                "input_token_ids": list(b"hi"),
                "finish_reasons": ["stop"],
            },
        )


async def test_streaming_is_the_default_and_chunks_are_cumulative(serving, engine: ScriptedEngine) -> None:
    async with serving(engine) as session, session.post("/generate", json={"prompt": "hi"}) as response:
        data = await response.read()
    assert data.endswith(b"\0")
    chunks = [json.loads(chunk) for chunk in data.split(b"\0")[:-1]]
    assert [chunk["texts"][0] for chunk in chunks[:3]] == ["H", "He", "Hel"]
    assert chunks[-1]["texts"] == ["Hello, world!"]
    assert chunks[-1]["output_token_ids"] == [list(b"Hello, world!")]
    assert [chunk.get("finish_reasons") for chunk in chunks] == [None] * (len(chunks) - 1) + [["stop"]]


async def test_results_of_plugins_are_sent_along(serving, engine: ScriptedEngine) -> None:
    engine.extra = {"perplexity": float("inf"), "words": 2}
    async with serving(engine) as session:
        _, body = await generate(session, {"prompt": "hi"})
    assert body["extra"] == {"perplexity": None, "words": 2}


async def test_a_failure_half_way_is_a_last_chunk(serving, engine: ScriptedEngine) -> None:
    engine.fail_after = 2
    async with serving(engine) as session, session.post("/generate", json={"prompt": "hi"}) as response:
        last = json.loads((await response.read()).split(b"\0")[-2])
    assert response.status == 200
    assert last["error"]["message"] == "the scripted failure"
    assert last["ksana_code"] == 2000


async def test_a_failure_before_the_first_token_is_a_status(serving, engine: ScriptedEngine) -> None:
    engine.fail_after, engine.failure = 0, RequestError("waited too long", status=503, code="waiting_timeout")
    async with serving(engine) as session, session.post("/generate", json={"prompt": "hi"}) as response:
        assert response.status == 503
        assert (await response.json())["error"]["code"] == "waiting_timeout"


async def test_a_plugin_result_that_is_not_json_fails_its_request_only(serving, engine: ScriptedEngine) -> None:
    engine.extra = {"bad": object()}
    async with serving(engine) as session:
        async with session.post("/generate", json={"prompt": "hi"}) as response:
            last = json.loads((await response.read()).split(b"\0")[-2])
            assert last["error"]["code"] == "internal_error"
        assert (await generate(session, {"prompt": "hi"}))[0] == 500
        engine.extra = {}
        assert (await generate(session, {"prompt": "hi"}))[0] == 200


async def test_input_tokens_and_messages(serving, engine: ScriptedEngine) -> None:
    assert (await draft_for(serving, engine, {"input_tokens": [1, 2]})).prompt_token_ids == [1, 2]
    messages = [{"role": "user", "content": "hi"}]
    assert (await draft_for(serving, engine, {"messages": messages})).messages == messages
    draft = await draft_for(serving, engine, {"prompt": json.dumps(messages), "use_chat_template": True})
    assert (draft.prompt, draft.messages) == (None, messages)


async def test_the_original_is_greedy_by_default(serving, engine: ScriptedEngine) -> None:
    sampled = {"topk": 5, "topp": 0.5, "temperature": 0.7, "min_p": 0.1, "seed": 3}
    for config, greedy in [
        ({}, True),
        ({"topk": 1, "do_sample": True, "temperature": 0.7}, True),
        ({**sampled, "do_sample": False}, True),
        ({**sampled, "temperature": 0}, True),
        (sampled, False),
        ({"topk": 0}, False),
    ]:
        draft = await draft_for(serving, engine, {"prompt": "hi", "sampling_config": config})
        assert draft.sampling.is_greedy is greedy, config
    draft = await draft_for(serving, engine, {"prompt": "hi", "sampling_config": sampled})
    assert draft.sampling == SamplingParams(top_k=5, top_p=0.5, temperature=0.7, min_p=0.1, seed=3)


async def test_max_new_tokens_absent_or_minus_one_is_no_limit(serving, engine: ScriptedEngine) -> None:
    for config, expected in [({}, None), ({"max_new_tokens": -1}, None), ({"max_new_tokens": 3}, 3)]:
        draft = await draft_for(serving, engine, {"prompt": "hi", "sampling_config": config})
        assert draft.sampling.max_tokens == expected


async def test_decoding_options_have_the_originals_names(serving, engine: ScriptedEngine) -> None:
    config = {
        "repetition_penalty": 1.2,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "decoder_no_repeat_ngram_size": 3,
        "logit_bias": {"7": 2, "8": -100},
        "bad_words": ["no"],
        "min_tokens": 2,
        "max_new_tokens": 5,
        "logprobs": 3,
        "input_top_logprobs_num": 1,
    }
    draft = await draft_for(serving, engine, {"prompt": "hi", "sampling_config": config})
    assert draft.sampling == SamplingParams(
        temperature=0.0,
        top_k=1,
        repetition_penalty=1.2,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        decoder_no_repeat_ngram_size=3,
        logit_bias=((7, 2.0), (8, -100.0)),
        bad_words=("no",),
        min_tokens=2,
        max_tokens=5,
        logprobs=3,
        prompt_logprobs=1,
    )


@pytest.mark.parametrize("nested", [True, False])
async def test_refit_embeddings_become_rows(serving, engine: ScriptedEngine, nested: bool) -> None:
    refit = {"pos": [0, 1], "embeddings": [[1, 2, 3, 4], [[1.0] * 4, [2.0] * 4]]}
    body = {"input_refit_embedding": refit} if nested else refit
    draft = await draft_for(serving, engine, {"prompt": "hello", **body})
    assert [(e.position, e.rows.shape, e.rows.dtype) for e in draft.embeddings] == [
        (0, (1, 4), np.float32),
        (1, (2, 4), np.float32),
    ]
    assert draft.embeddings[0].rows.tolist() == [[1, 2, 3, 4]]


async def test_additional_params_and_thinking_reach_the_draft(serving, engine: ScriptedEngine) -> None:
    body = {
        "messages": [{"role": "user", "content": "hi"}],
        "additional_params": {"a": 1},
        "sampling_config": {"enable_thinking": False},
        "debug_mode": True,
    }
    draft = await draft_for(serving, engine, body)
    assert draft.additional_params == {"a": 1}
    assert draft.chat_template_kwargs == {"enable_thinking": False}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"input_tokens": []}, "input_tokens"),
        ({"input_tokens": [-1]}, "input_tokens"),
        ({"input_tokens": [2**63]}, "input_tokens"),
        ({"input_tokens": [1, "2"]}, "input_tokens[1]"),
        ({"input_tokens": [1, True]}, "input_tokens[1]"),
        ({"prompt": "a", "input_tokens": [1]}, "input_tokens"),
        ({"prompt": 3}, "prompt"),
        ({"prompt": "x" * 300}, "prompt"),
        ({"prompt": "not json", "use_chat_template": True}, "prompt"),
        ({"prompt": "[1]", "use_chat_template": True}, "prompt"),
        ({"messages": "hi"}, "messages"),
        ({"prompt": "a", "model_type": "llama"}, "model_type"),
        ({"prompt": "a", "structured_output_regex": "a" * 20_000}, "structured_output_regex"),
        (
            {"prompt": "a", "structured_output_regex": "a", "sampling_config": {"json_schema": "{}"}},
            "structured_output_regex",
        ),
        ({"prompt": "a", "sampling_config": {"json_schema": 5}}, "sampling_config.json_schema"),
        (
            {"prompt": "a", "sampling_config": {"json_schema": "{}", "ignore_eos": True}},
            "sampling_config.ignore_eos",
        ),
        ({"prompt": "a", "sampling_config": {"logprobs": 21}}, "sampling_config.logprobs"),
        ({"prompt": "a", "sampling_config": {"input_top_logprobs_num": 21}}, "sampling_config.input_top_logprobs_num"),
        ({"prompt": "a", "sampling_config": {"repetition_penalty": 0}}, "sampling_config.repetition_penalty"),
        ({"prompt": "a", "sampling_config": {"logit_bias": {"-1": 1}}}, "sampling_config.logit_bias"),
        ({"prompt": "a", "sampling_config": {"logit_bias": {str(2**63): 1}}}, "sampling_config.logit_bias"),
        ({"prompt": "a", "sampling_config": {"logit_bias": {"5": "1"}}}, "sampling_config.logit_bias.5"),
        ({"prompt": "a", "sampling_config": {"min_tokens": 3, "max_new_tokens": 2}}, "sampling_config.min_tokens"),
        ({"prompt": "a", "sampling_config": {"num_beams": 33}}, "sampling_config.num_beams"),
        ({"prompt": "a", "sampling_config": {"num_beams": 0}}, "sampling_config.num_beams"),
        (
            {"prompt": "a", "sampling_config": {"num_beams": 4, "num_return_sequences": 5}},
            "sampling_config.num_return_sequences",
        ),
        ({"prompt": "a", "sampling_config": {"num_beams": 4, "stop_strings": ["x"]}}, "sampling_config.stop_strings"),
        ({"prompt": "a", "sampling_config": {"num_beams": 4, "json_schema": "{}"}}, "sampling_config.num_beams"),
        ({"prompt": "a", "sampling_config": {"early_stopping": "always"}}, "sampling_config.early_stopping"),
        ({"prompt": "a", "sampling_config": {"no_repeat_ngram_size": -1}}, "sampling_config.no_repeat_ngram_size"),
        ({"prompt": "a", "sampling_config": {"temprature": 1}}, "sampling_config.temprature"),
        ({"prompt": "a", "sampling_config": {"topk": -5}}, "sampling_config.topk"),
        ({"prompt": "a", "sampling_config": {"topk": 1.5}}, "sampling_config.topk"),
        ({"prompt": "a", "sampling_config": {"topp": 0}}, "sampling_config.topp"),
        ({"prompt": "a", "sampling_config": {"max_new_tokens": -2}}, "sampling_config.max_new_tokens"),
        ({"prompt": "a", "sampling_config": {"topk": 5, "temperature": -1}}, "sampling_config.temperature"),
        ({"prompt": "a", "sampling_config": {"stop_strings": [""]}}, "sampling_config.stop_strings"),
        ({"prompt": "a", "sampling_config": []}, "sampling_config"),
        ({"prompt": "a", "pos": [1]}, "input_refit_embedding"),
        ({"prompt": "a", "pos": [0], "embeddings": [[1, 2, 3]]}, "input_refit_embedding.embeddings[0]"),
        ({"prompt": "a", "pos": [0], "embeddings": [[[1, 2, 3, 4], [1]]]}, "input_refit_embedding.embeddings[0]"),
        ({"prompt": "a", "pos": [0], "embeddings": [[1e300] * 4]}, "input_refit_embedding.embeddings[0]"),
        ({"prompt": "a", "pos": [0], "embeddings": [[]]}, "input_refit_embedding.embeddings[0]"),
        ({"prompt": "a", "pos": [-1], "embeddings": [[1] * 4]}, "input_refit_embedding.pos[0]"),
    ],
)
async def test_bad_fields_are_named(serving, engine: ScriptedEngine, body: dict[str, Any], param: str) -> None:
    async with serving(engine) as session:
        status, answer = await generate(session, body)
        assert (status, answer["error"]["param"]) == (400, param), answer
        assert set(answer["error"]) == {"message", "type", "code", "param"}
        assert answer["ksana_code"] == 2000
        assert (await generate(session, {"prompt": "hi"}))[0] == 200


async def test_a_value_of_no_member_of_a_union_is_told_all_that_it_may_be(serving, engine: ScriptedEngine) -> None:
    async with serving(engine) as session:
        _, answer = await generate(session, {"prompt": "a", "sampling_config": {"early_stopping": "always"}})
    assert answer["error"]["message"] == "sampling_config.early_stopping: Input should be a valid boolean, or 'never'"


async def test_temperature_as_infinity_written_large_is_refused(serving, engine: ScriptedEngine) -> None:
    data = b'{"prompt": "a", "sampling_config": {"topk": 5, "temperature": 1e999}}'
    async with (
        serving(engine) as session,
        session.post("/generate", data=data, headers={"Content-Type": "application/json"}) as response,
    ):
        assert response.status == 400
        assert (await response.json())["error"]["param"] == "sampling_config.temperature"


async def test_every_beam_is_returned_unless_the_client_says_how_many(serving, engine: ScriptedEngine) -> None:
    config: dict[str, Any] = {"num_beams": 4, "length_penalty": 0.5, "early_stopping": "never"}
    draft = await draft_for(serving, engine, {"prompt": "a", "sampling_config": config})
    expected = SamplingParams(num_beams=4, n=4, temperature=0.0, top_k=1, length_penalty=0.5, early_stopping="never")
    assert draft.sampling == expected
    draft = await draft_for(serving, engine, {"prompt": "a", "sampling_config": {**config, "num_return_sequences": 2}})
    assert draft.sampling == replace(expected, n=2)


async def test_neutral_values_of_what_is_not_there_are_accepted(serving, engine: ScriptedEngine) -> None:
    config = {
        "logprobs": 0,
        "repetition_penalty": 1.0,
        "num_beams": 1,
        "num_return_sequences": 1,
        "length_penalty": 1,
        "no_repeat_ngram_size": 0,
        "json_schema": None,
        "enable_structured_output": False,
    }
    await draft_for(serving, engine, {"prompt": "a", "model_type": "", "sampling_config": config})


async def test_unknown_models_are_404(serving, engine: ScriptedEngine) -> None:
    async with serving(engine) as session:
        status, answer = await generate(session, {"prompt": "a", "model_name": "other"})
        assert (status, answer["error"]["code"]) == (404, "model_not_found")
        for name in ("", "scripted", "scripted-model"):
            assert (await generate(session, {"prompt": "a", "model_name": name}))[0] == 200


@pytest.mark.parametrize(
    ("config", "grammar"),
    [
        ({"enable_structured_output": True, "json_schema": '{"type": "null"}'}, ("json_schema", '{"type": "null"}')),
        ({"json_schema": {"type": "null"}}, ("json_schema", '{"type": "null"}')),
        ({"enable_structured_output": True}, ("json_object", "")),
        ({"enable_structured_output": True, "json_schema": ""}, ("json_object", "")),
        ({"enable_structured_output": False, "json_schema": "{}"}, None),
        ({}, None),
    ],
)
async def test_structured_output(
    serving, engine: ScriptedEngine, config: dict[str, Any], grammar: tuple[str, str] | None
) -> None:
    draft = await draft_for(serving, engine, {"prompt": "a", "sampling_config": config})
    found = draft.sampling.grammar
    assert (None if found is None else (found.kind, found.value)) == grammar


async def test_a_regular_expression_and_the_end_of_thinking(serving, engine: ScriptedEngine) -> None:
    body = {"prompt": "a", "structured_output_regex": "a+", "sampling_config": {"enable_thinking": True}}
    draft = await draft_for(serving, engine, body)
    assert draft.sampling.grammar == GrammarSpec("regex", "a+")
    assert draft.sampling.grammar_after == ()  # no token of its own: this model does not think
