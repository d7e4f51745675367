"""What options of a request cost: the decode rate of a batch with them against the rate without, in turns.

    python benchmarks/decoding_options.py --threads 2
    python benchmarks/decoding_options.py --only logprobs

The rate counts the tokens of all requests of the batch, from the first step in which all decode to the last.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import dataclass, field, replace
from typing import Any

from ksana import LLM, SamplingParams


@dataclass(frozen=True)
class Case:
    """Options that the first ``num_asking`` requests of a batch ask for; all of them if None."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    num_asking: int | None = None


PENALTIES = {"repetition_penalty": 1.1, "presence_penalty": 0.2, "frequency_penalty": 0.2}

CASES = (
    Case("logprobs=5", {"logprobs": 5}),
    Case("penalties on one", PENALTIES, num_asking=1),
    Case("penalties on all", PENALTIES),
    Case("no_repeat_ngram_size=3 on all", {"no_repeat_ngram_size": 3}),
    Case("logit_bias of 100 tokens on all", {"logit_bias": dict.fromkeys(range(100), 1.0)}),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--threads", type=int, default=0, help="0: as the server chooses")
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=128, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=96, help="tokens of an answer")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="", help="cases whose name holds this")
    arguments = parser.parse_args()
    cases = [case for case in CASES if arguments.only in case.name]
    with LLM(arguments.model, threads=arguments.threads, max_num_seqs=arguments.concurrency) as llm:
        measure(llm, Case("warm-up"), arguments)
        ratios: dict[str, list[float]] = {case.name: [] for case in cases}
        rates: dict[str, list[float]] = {"plain": [], **{case.name: [] for case in cases}}
        for _ in range(arguments.rounds):
            for case in cases:  # each beside a plain one, so that a machine that slows down slows both
                plain, asked = (measure(llm, each, arguments) for each in (Case("plain"), case))
                rates["plain"].append(plain)
                rates[case.name].append(asked)
                ratios[case.name].append(asked / plain)
    print(f"plain: {statistics.median(rates['plain']):.1f} tokens/s at {arguments.concurrency} requests")
    for case in cases:
        cost = 100 * (1 - statistics.median(ratios[case.name]))
        print(f"{case.name}: {statistics.median(rates[case.name]):.1f} tokens/s, {cost:+.1f} % less")


def measure(llm: LLM, case: Case, arguments: argparse.Namespace) -> float:
    """Tokens a second, of all requests."""
    count = arguments.concurrency
    prompts = [[1000 + 13 * row + 7 * i for i in range(arguments.prompt)] for row in range(count)]
    plain = SamplingParams(max_tokens=arguments.tokens, temperature=arguments.temperature, seed=1, ignore_eos=True)
    asking = count if case.num_asking is None else case.num_asking
    sampling = [replace(plain, **case.options) if row < asking else plain for row in range(count)]
    outputs = llm.generate(prompts, sampling, progress=False)
    starts = [output.stats.first_token_time or time.monotonic() for output in outputs]
    ends = [output.stats.finished_time or 0.0 for output in outputs]
    return count * (arguments.tokens - 1) / (max(ends) - max(starts))


if __name__ == "__main__":
    main()
