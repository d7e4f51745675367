"""Several sequences of one prompt are those that separate requests with their seeds would get."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from ksana.engine.admission import sequence_seeds
from ksana.engine.llm import LLM
from ksana.errors import RequestError
from ksana.types.sampling import SamplingParams

PROMPT = list(range(3, 40))
BLOCK_SIZE = 16


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("length", [1, 2 * BLOCK_SIZE - 1, 2 * BLOCK_SIZE, 2 * BLOCK_SIZE + 1])
def test_each_sequence_equals_a_request_with_its_seed(
    tiny_path: Callable[..., Path], start_llm: Callable[..., LLM], caching: bool, length: int
) -> None:
    """Wherever in a block the prompt ends."""
    llm = start_llm(tiny_path(), enable_prefix_caching=caching, block_size=BLOCK_SIZE)
    params = {"max_tokens": 12, "temperature": 1.5, "logprobs": 2, "ignore_eos": True}
    prompt = PROMPT[:length]
    together = llm.generate(prompt, SamplingParams(n=5, seed=7, **params))
    alone = [llm.generate(prompt, SamplingParams(seed=seed, **params))[0] for seed in sequence_seeds(7, 5)]
    assert len({tuple(output.token_ids) for output in together}) == 5
    for one, other in zip(together, alone, strict=True):
        assert (one.token_ids, one.logprobs) == (other.token_ids, other.logprobs)


def test_more_sequences_than_may_run_at_once(tiny_path: Callable[..., Path], start_llm: Callable[..., LLM]) -> None:
    few, many = start_llm(tiny_path(), max_num_seqs=2), start_llm(tiny_path())
    sampling = SamplingParams(n=6, seed=1, max_tokens=5, ignore_eos=True)
    expected = [output.token_ids for output in many.generate(PROMPT, sampling)]
    assert [output.token_ids for output in few.generate(PROMPT, sampling)] == expected


def test_best_of_gives_the_likeliest(tiny_path: Callable[..., Path], start_llm: Callable[..., LLM]) -> None:
    llm = start_llm(tiny_path())
    params = {"seed": 3, "max_tokens": 6, "temperature": 2.0, "ignore_eos": True}
    everything = llm.generate(PROMPT, SamplingParams(n=6, logprobs=0, **params))
    best = llm.generate(PROMPT, SamplingParams(n=2, best_of=6, **params))
    ranked = sorted(everything, key=lambda output: -sum(entry.logprob for entry in output.logprobs))
    assert [output.token_ids for output in best] == [output.token_ids for output in ranked[:2]]
    assert all(output.logprobs == [] for output in best), "nobody has asked for them"


def test_sequences_beyond_the_queue_are_refused_whole(
    tiny_path: Callable[..., Path], start_llm: Callable[..., LLM]
) -> None:
    llm = start_llm(tiny_path(), max_waiting_queue_len=4)
    with pytest.raises(RequestError, match="queue is full"):
        llm.generate(PROMPT, SamplingParams(n=6, max_tokens=2))
    assert len(llm.generate(PROMPT, SamplingParams(n=4, max_tokens=2))) == 4
