"""Structured output on whole engines."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from ksana import LLM, RequestError, SamplingParams
from ksana.testing.json_schemas import random_schema
from ksana.text import llguidance_grammar
from ksana.text.llguidance_grammar import GuidanceCompiler
from ksana.types.grammar import GrammarSpec
from ksana.types.output import FinishReason, RequestOutput
from ksana.types.request import RequestDraft
from ksana.types.sampling_checks import MAX_LOGIT_BIASES

StartLLM = Callable[..., LLM]
TinyPath = Callable[..., Path]

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "maximum": 150}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def schema(value: Any) -> GrammarSpec:
    return GrammarSpec("json_schema", json.dumps(value))


def biases(llm: LLM) -> tuple[tuple[int, float], ...]:
    """A liking for what ends things, or a random model would write strings for ever."""
    tokenizer = llm.engine.tokenizer
    ending = [t for t in range(tokenizer.vocab_size) if any(c in (tokenizer.token_bytes(t) or b"") for c in b'"}]')]
    return (*((token, 4.0) for token in ending[: MAX_LOGIT_BIASES - 1]), (2, 12.0))


def test_every_finished_answer_under_random_schemas_is_valid(tiny_path: TinyPath, start_llm: StartLLM) -> None:
    llm = start_llm(tiny_path(), num_blocks=600, max_num_seqs=32)
    schemas = [random_schema(seed, depth=2) for seed in range(1000, 1200)]
    bias = biases(llm)
    sampling = [
        SamplingParams(max_tokens=250, seed=seed, grammar=schema(value), logit_bias=bias)
        for seed, value in enumerate(schemas)
    ]
    outputs = llm.generate(["As JSON: "] * len(schemas), sampling)
    finished = 0
    for value, output in zip(schemas, outputs, strict=True):
        if output.finish_reason is FinishReason.STOP:
            finished += 1
            jsonschema.Draft202012Validator(value).validate(json.loads(output.text))
    assert finished > 120


def test_the_demo_model_writes_what_it_is_asked_for(start_llm: StartLLM) -> None:
    llm = start_llm("demo", threads=2)
    prompt = [{"role": "user", "content": "Ada Lovelace died at the age of 36. Answer in JSON."}]
    greedy = SamplingParams(temperature=0.0, max_tokens=80, grammar=schema(PERSON))
    specs = [schema(PERSON), GrammarSpec("regex", r"\d{3}-\d{4}"), GrammarSpec.choice(["yes", "no"])]
    sampled = [SamplingParams(max_tokens=80, seed=7, grammar=spec) for spec in specs]
    person, other, number, choice = llm.chat([prompt] * 4, [greedy, *sampled])
    for output in (person, other, number, choice):
        assert output.finish_reason is FinishReason.STOP
    assert json.loads(person.text)["age"] == 36
    jsonschema.validate(json.loads(other.text), PERSON)
    assert number.text[3] == "-" and choice.text in ("yes", "no")


def answers(llm: LLM, prompt: Sequence[int] = range(5, 45)) -> list[RequestOutput]:
    sampling = [
        SamplingParams(max_tokens=60, seed=seed, grammar=schema(PERSON), logit_bias=biases(llm)) for seed in range(6)
    ]
    return llm.generate([list(prompt)] * len(sampling), sampling)


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.token_ids for output in outputs]


def test_preemption_chunks_and_cached_prefixes_change_nothing(tiny_path: TinyPath, start_llm: StartLLM) -> None:
    expected = tokens(answers(start_llm(tiny_path())))
    few = {"num_blocks": 16, "block_size": 8, "split_fuse_token_num": 8, "launch_block_threshold": 1}
    scarce = start_llm(tiny_path(), enable_prefix_caching=False, **few)
    outputs = answers(scarce)
    assert any(output.stats.num_preemptions for output in outputs)
    assert tokens(outputs) == expected
    cached = start_llm(tiny_path())
    answers(cached)
    outputs = answers(cached)
    assert all(output.stats.num_cached_tokens for output in outputs)
    assert tokens(outputs) == expected


@pytest.mark.parametrize("method", ["ngram", "trie"])
def test_drafts_change_nothing(tiny_path: TinyPath, start_llm: StartLLM, method: str) -> None:
    prompt = [*range(5, 15)] * 4
    expected = tokens(answers(start_llm(tiny_path()), prompt))
    drafting = start_llm(tiny_path(), method=method, step_overhead=1000.0)
    for _ in range(3):
        assert tokens(answers(drafting, prompt)) == expected


def test_each_of_several_answers_fits(tiny_path: TinyPath, start_llm: StartLLM) -> None:
    llm = start_llm(tiny_path())
    spec = GrammarSpec("regex", "[0-9]{3}")
    outputs = llm.generate("The fox", SamplingParams(max_tokens=10, seed=1, n=4, grammar=spec))
    texts = [output.text for output in outputs]
    assert len(set(texts)) > 1
    assert all(len(text) == 3 and text.isdecimal() for text in texts)


def test_neighbours_do_not_notice(tiny_path: TinyPath, start_llm: StartLLM) -> None:
    llm = start_llm(tiny_path())
    plain = SamplingParams(max_tokens=30, seed=5)
    [alone] = llm.generate("The fox", plain)
    constrained = SamplingParams(max_tokens=30, seed=6, grammar=schema(PERSON))
    _, beside, _ = llm.generate(["The dog", "The fox", "A cat"], [constrained, plain, constrained])
    assert beside.token_ids == alone.token_ids


def test_nothing_but_the_length_ends_a_text_before_it_fits(tiny_path: TinyPath, start_llm: StartLLM) -> None:
    llm = start_llm(tiny_path())
    sampling = SamplingParams(max_tokens=40, seed=1, grammar=GrammarSpec("regex", "a{60}"), logit_bias=((2, 100.0),))
    [output] = llm.generate("The fox", sampling)
    assert output.finish_reason is FinishReason.LENGTH
    assert set(output.text) == {"a"}


def test_a_reasoning_part_is_free(tiny_path: TinyPath, start_llm: StartLLM) -> None:
    llm = start_llm(tiny_path())
    [plain] = llm.generate("The fox", SamplingParams(max_tokens=40, seed=3, logit_bias=((2, -100.0),)))
    end = tuple(plain.token_ids[9:11])
    sampling = SamplingParams(
        max_tokens=40,
        seed=3,
        grammar=GrammarSpec.choice(["yes", "no"]),
        grammar_after=end,
        logit_bias=((2, -100.0),),
    )
    [output] = llm.generate("The fox", sampling)
    assert output.token_ids[:11] == plain.token_ids[:11]
    assert output.finish_reason is FinishReason.STOP
    assert llm.engine.tokenizer.decode(output.token_ids[11:-1]) in ("yes", "no")


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"grammar": GrammarSpec("json_schema", '{"type": "strin"}')}, "grammar"),
        ({"grammar": GrammarSpec("regex", "(")}, "grammar"),
        ({"grammar": GrammarSpec("json_object"), "ignore_eos": True}, "ignore_eos"),
        ({"grammar": GrammarSpec("json_object"), "num_beams": 2}, "num_beams"),
    ],
)
def test_bad_requests_are_refused_and_others_go_on(
    tiny_path: TinyPath, start_llm: StartLLM, options: dict[str, Any], param: str
) -> None:
    llm = start_llm(tiny_path())
    with pytest.raises(RequestError) as refusal:
        llm.generate("The fox", SamplingParams(**options))
    assert (refusal.value.status, refusal.value.param) == (400, param)
    [output] = llm.generate("The fox", SamplingParams(max_tokens=3))
    assert output.finish_reason is FinishReason.LENGTH


def test_a_grammar_that_becomes_too_complex_ends_its_own_request(
    tiny_path: TinyPath, start_llm: StartLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = start_llm(tiny_path())
    plain = SamplingParams(max_tokens=5, seed=1)
    [expected] = llm.generate("A cat", plain)
    monkeypatch.setattr(llguidance_grammar, "_BASE_S", -3600)
    with pytest.raises(RequestError) as failure:
        llm.generate("The fox", SamplingParams(max_tokens=50, grammar=GrammarSpec("json_object")))
    assert failure.value.code == "no_token_left"
    assert llm.generate("A cat", plain)[0].token_ids == expected.token_ids


def test_who_waits_for_a_grammar_holds_up_nobody_and_may_leave(
    tiny_path: TinyPath, start_llm: StartLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiling, may_go_on = threading.Event(), threading.Event()
    compile_now = GuidanceCompiler.compile

    def compile_later(self: GuidanceCompiler, spec: GrammarSpec) -> Any:
        compiling.set()
        assert may_go_on.wait(30)
        return compile_now(self, spec)

    monkeypatch.setattr(GuidanceCompiler, "compile", compile_later)
    engine = start_llm(tiny_path()).engine

    def draft(**options: Any) -> RequestDraft:
        return RequestDraft(prompt="The fox", sampling=SamplingParams(max_tokens=4, **options))

    async def scenario() -> None:
        grammar = GrammarSpec.choice(["yes"])
        waiting = [asyncio.create_task(engine.submit(draft(grammar=grammar))) for _ in range(2)]
        await asyncio.to_thread(compiling.wait, 30)
        async with await engine.submit(draft()) as stream:
            assert len((await stream.result()).token_ids) == 4
        waiting[0].cancel()
        await asyncio.wait(waiting[:1])
        assert engine.num_unfinished() == 1
        may_go_on.set()
        async with await waiting[1] as stream:
            assert (await stream.result()).text == "yes"

    try:
        asyncio.run(scenario())
    finally:
        may_go_on.set()
