"""What one request may expect of the engine, whatever others do."""

from __future__ import annotations

import asyncio
import json
import math
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ksana import LLM, AsyncEngine, RequestDraft, RequestError, SamplingParams, UsageError
from ksana.errors import ConfigError, EngineDeadError, ModelLoadError
from ksana.testing import TransformersOracle
from ksana.types.output import FinishReason

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def llm(tiny_path: Callable[..., Path], start_llm: Callable[..., LLM]) -> LLM:
    return start_llm(tiny_path(), max_num_seqs=6)


def random_prompts(count: int, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(3, 500) for _ in range(rng.randrange(3, 60))] for _ in range(count)]


def test_generated_tokens_are_found_in_the_cache(llm: LLM) -> None:
    """The next turn of a conversation reuses the answer too, not only the prompt."""
    [first] = llm.generate(random_prompts(1), SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True))
    turn = first.prompt_token_ids + first.token_ids
    [second] = llm.generate([[*turn, 5, 6]], SamplingParams(max_tokens=1))
    assert second.stats.num_cached_tokens == (len(turn) - 1) // 16 * 16 > len(first.prompt_token_ids)


def test_a_seed_gives_the_same_tokens_in_any_batch(llm: LLM) -> None:
    """vllm#51226: seeds were ignored on CPU next to an unseeded request."""
    prompt = random_prompts(1)[0]
    seeded = [
        SamplingParams(max_tokens=16, seed=11, temperature=t, top_k=k, top_p=p, min_p=m, ignore_eos=True)
        for t, k, p, m in [(1.0, 0, 1.0, 0.0), (1.3, 40, 0.9, 0.0), (0.7, 0, 0.95, 0.05)]
    ]
    alone = [llm.generate(prompt, params)[0].token_ids for params in seeded]
    noise = [SamplingParams(max_tokens=20, temperature=1.0), SamplingParams(max_tokens=9, temperature=0.0)]
    batch = [prompt, *random_prompts(2, 1), prompt, prompt]
    mixed = llm.generate(batch, [seeded[0], *noise, seeded[1], seeded[2]])
    assert [mixed[i].token_ids for i in (0, 3, 4)] == alone
    assert llm.generate(prompt, SamplingParams(max_tokens=16, seed=12))[0].token_ids != alone[0][:16]


def test_unseeded_requests_differ(llm: LLM) -> None:
    outputs = llm.generate([random_prompts(1)[0]] * 4, SamplingParams(max_tokens=12, ignore_eos=True))
    assert len({tuple(output.token_ids) for output in outputs}) == 4


def test_end_of_sequence_stop_token_and_length(llm: LLM) -> None:
    prompt = random_prompts(1)[0]
    [free] = llm.generate(prompt, SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True))
    assert free.finish_reason is FinishReason.LENGTH and free.stop_reason is None
    last = free.token_ids[4]
    first = free.token_ids.index(last)
    [stopped] = llm.generate(
        prompt, SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, stop_token_ids=(last,))
    )
    assert stopped.finish_reason is FinishReason.STOP and stopped.stop_reason == last
    assert stopped.token_ids == free.token_ids[: first + 1]
    assert stopped.text == llm.engine.tokenizer.decode(free.token_ids[:first])


def test_stop_string_cuts_text_and_tokens(llm: LLM) -> None:
    prompt = random_prompts(1)[0]
    [free] = llm.generate(prompt, SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True))
    stop = free.text[6:9]
    where = free.text.index(stop)
    [cut] = llm.generate(prompt, SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True, stop=(stop,)))
    assert (cut.finish_reason, cut.stop_reason) == (FinishReason.STOP, stop)
    assert cut.text == free.text[:where]
    assert len(cut.token_ids) < 30 and cut.token_ids == free.token_ids[: len(cut.token_ids)]
    [kept] = llm.generate(
        prompt,
        SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True, stop=(stop,), include_stop_str_in_output=True),
    )
    assert kept.text == free.text[: where + len(stop)]


def test_log_probabilities_equal_transformers(llm: LLM, tiny_path: Callable[..., Path]) -> None:
    [output] = llm.generate(
        random_prompts(1), SamplingParams(max_tokens=10, seed=3, temperature=1.7, logprobs=4, ignore_eos=True)
    )
    expected = TransformersOracle(tiny_path()).output_logits(output).log_softmax(-1)
    assert len(output.logprobs) == 10
    for row, token, entry in zip(expected, output.token_ids, output.logprobs, strict=True):
        assert entry.token_id == token
        assert entry.logprob == pytest.approx(row[token].item(), abs=1e-4)
        values, indices = row.topk(4)
        assert [index for index, _ in entry.top] == indices.tolist()
        assert [value for _, value in entry.top] == pytest.approx(values.tolist(), abs=1e-4)


def test_perplexity_example(tiny_path: Callable[..., Path], start_llm: Callable[..., LLM], tmp_path: Path) -> None:
    """The example's number is transformers' cross entropy over the answer."""
    folder = tmp_path / "model"
    shutil.copytree(tiny_path(), folder)
    shutil.copy(EXAMPLES / "perplexity" / "ksana_plugin.py", folder)
    llm = start_llm(folder, trust_remote_code=True)
    [output] = llm.generate("What is the capital", SamplingParams(max_tokens=12, seed=1, ignore_eos=True))
    logits = TransformersOracle(tiny_path()).output_logits(output)
    expected = math.exp(torch.nn.functional.cross_entropy(logits, torch.tensor(output.token_ids)).item())
    assert output.extra["perplexity"] == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(
    "values",
    [
        {"temperature": -1.0},
        {"temperature": math.nan},
        {"temperature": math.inf},
        {"top_p": 0.0},
        {"top_p": 1.5},
        {"top_k": -2},
        {"top_k": 1.5},
        {"min_p": 2.0},
        {"max_tokens": -1},
        {"max_tokens": 2.5},
        {"seed": 2**64},
        {"stop": ("",)},
        {"stop": ("a",) * 17},
        {"logprobs": 21},
        {"logprobs": True},
        {"prompt_logprobs": -1},
        {"min_tokens": -1},
        {"min_tokens": 9, "max_tokens": 8},
        {"repetition_penalty": 0.0},
        {"repetition_penalty": math.nan},
        {"presence_penalty": 2.1},
        {"frequency_penalty": "1"},
        {"no_repeat_ngram_size": 1025},
        {"decoder_no_repeat_ngram_size": 2, "no_repeat_ngram_size": 3},
        {"decoder_no_repeat_ngram_size": 2, "encoder_no_repeat_ngram_size": 2},
        {"logit_bias": {5: 101}},
        {"logit_bias": {5: math.inf}},
        {"logit_bias": {"5": 1.0}},
        {"logit_bias": ((5, 1.0), (5, 2.0))},
        {"logit_bias": ((5, 1.0, 2.0),)},
        {"logit_bias": 5},
        {"logit_bias": dict.fromkeys(range(1025), 1.0)},
        {"bad_words": ("",)},
        {"bad_words": ("x" * 129,)},
        {"bad_words": ("x",) * 129},
        {"n": 0},
        {"n": 3, "num_beams": 2},
        {"best_of": 1, "n": 2},
        {"num_beams": 33},
        {"length_penalty": 1e9},
        {"early_stopping": 1},
        {"grammar": "json"},
    ],
)
def test_absurd_sampling_values_name_their_field(values: dict[str, Any]) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**values)
    assert caught.value.param == next(iter(values)) and caught.value.status == 400


@pytest.mark.parametrize("values", [{"stop": None}, {"stop": 5}, {"stop_token_ids": 5}, {"stop_token_ids": ("5",)}])
def test_stops_of_other_types_name_their_field(values: dict[str, Any]) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**values)
    assert caught.value.param == next(iter(values))


def test_a_bare_stop_string_is_one_string_and_not_its_characters() -> None:
    assert SamplingParams(stop="END").stop == ("END",)  # type: ignore[arg-type]
    given = SamplingParams(stop=["a", "b"], stop_token_ids=[3])  # type: ignore[arg-type]
    assert (given.stop, given.stop_token_ids) == (("a", "b"), (3,))


def test_options_are_checked_by_name_and_by_plugins(tiny_path: Callable[..., Path]) -> None:
    for start, name in ((LLM, "LLM"), (AsyncEngine.load, "AsyncEngine.load")):
        with pytest.raises(ConfigError, match=rf"{name} has no option 'num_block'; did you mean num_blocks\?"):
            start(str(tiny_path()), num_block=5)
        with pytest.raises(ConfigError, match=rf"{name}\(num_blocks=\.\.\.\): -1 is not valid"):
            start(str(tiny_path()), num_blocks=-1)


async def stream_text(model: Path) -> str:
    """The example of :class:`AsyncEngine`."""
    engine = await asyncio.to_thread(AsyncEngine.load, str(model), num_blocks=50, threads=1)
    greedy = SamplingParams(temperature=0.0, max_tokens=8)
    async with await engine.submit(RequestDraft(prompt="Once upon a time", sampling=greedy)) as stream:
        text = "".join([output.text_delta async for output in stream])
    await engine.stop("done")
    return text


def test_async_engine_from_keywords_answers_as_the_offline_one(llm: LLM, tiny_path: Callable[..., Path]) -> None:
    [offline] = llm.generate("Once upon a time", SamplingParams(temperature=0.0, max_tokens=8))
    assert asyncio.run(stream_text(tiny_path())) == offline.text


def test_a_stop_string_within_the_last_token_wins_over_the_length(llm: LLM) -> None:
    prompt = random_prompts(1)[0]
    [free] = llm.generate(prompt, SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True))
    stop = free.text[-1]
    [cut] = llm.generate(prompt, SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, stop=(stop,)))
    count = len(cut.token_ids)
    [last] = llm.generate(prompt, SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, stop=(stop,)))
    assert (last.finish_reason, last.stop_reason, last.text) == (FinishReason.STOP, stop, cut.text)
    assert last.token_ids == cut.token_ids


def test_a_closed_llm_says_so(tiny_path: Callable[..., Path], start_llm: Callable[..., LLM]) -> None:
    closed = start_llm(tiny_path())
    closed.close()
    with pytest.raises(EngineDeadError, match="closed"):
        closed.generate("again")


def test_tiny_temperature_is_finite_and_nearly_greedy(llm: LLM) -> None:
    """Dividing by the smallest temperatures must not make infinities that end the request."""
    prompt = random_prompts(1)[0]
    [greedy] = llm.generate(prompt, SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True))
    for temperature in (1e-6, 1e-38, 5e-324):
        for more in ({}, {"top_p": 0.9}, {"top_k": 5}):
            [output] = llm.generate(
                prompt, SamplingParams(temperature=temperature, max_tokens=6, ignore_eos=True, **more)
            )
            assert output.token_ids == greedy.token_ids


def test_options_by_field_and_by_flag(tiny_path: Callable[..., Path]) -> None:
    with LLM(tiny_path(), num_blocks=50, scheduling_policy="priority", cache_memory_fraction=0.25) as llm:
        assert llm.engine.config.scheduler.policy == "priority"
        assert llm.engine.config.cache.memory_fraction == 0.25


def test_a_length_beyond_the_model_is_refused(tiny_path: Callable[..., Path]) -> None:
    with pytest.raises(UsageError, match=r"513.*512"):
        LLM(tiny_path(), max_model_len=513)


def test_weights_that_do_not_fit_name_the_model(tiny_path: Callable[..., Path], tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_path(), tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "intermediate_size": 96}))
    with pytest.raises(ModelLoadError, match=r"model: weight .*_proj.* \[128, 64\]"):
        LLM(folder)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_is_close_to_float32(
    tiny_path: Callable[..., Path], start_llm: Callable[..., LLM], dtype: str
) -> None:
    """The packed weights of these types are other code than float32's."""
    oracle = TransformersOracle(tiny_path())
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=1)
    for output in start_llm(tiny_path(), dtype=dtype).generate(random_prompts(4), params):
        expected = oracle.output_logits(output).log_softmax(-1)
        for row, entry in zip(expected, output.logprobs, strict=True):
            assert entry.logprob == pytest.approx(row[entry.token_id].item(), abs=0.1)
