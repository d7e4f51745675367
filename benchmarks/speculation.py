"""What speculative decoding gains, and what it costs where there is nothing to gain.

    python benchmarks/speculation.py                        # the demo model
    python benchmarks/speculation.py --requests 1 8 32 --rounds 5

Two kinds of work: ``copy`` asks for a passage of 200 tokens to be repeated, as summaries, corrections and answers with
quotations do in part; ``free`` continues a text by sampling, where hardly a guess is right. Each method answers the
same requests, in turns; passages differ from round to round, so that no method has seen an answer before. Printed are
tokens a second after the first token, the ratio to plain decoding, and how many of the guesses were accepted. The
answers must be the same; if they are not, the command fails.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from ksana import LLM, SamplingParams
from ksana.types.output import RequestOutput

TEXT = Path(__file__).parent / "data/opticks.txt"
PASSAGE_TOKENS = 200
PLAIN = "none"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--methods", nargs="+", default=["ngram", "trie"], help="beside plain decoding")
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 4, 16], help="requests at once")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each, of which the median counts")
    parser.add_argument("--threads", type=int, default=0)
    arguments = parser.parse_args()
    methods = [PLAIN, *arguments.methods]
    engines = {m: LLM(arguments.model, threads=arguments.threads, speculative=m) for m in methods}
    passages = passages_of(engines[PLAIN])
    try:
        for count in arguments.requests:
            for kind in ("copy", "free"):
                report(kind, count, measure(engines, passages, kind, count, arguments.rounds))
    finally:
        for llm in engines.values():
            llm.close()


@dataclass(slots=True)
class Result:
    """Of one method.

    Attributes:
        rates: tokens a second of each round, over all requests.
        num_drafts, num_accepted: tokens guessed, and those of them that were right.
    """

    rates: list[float] = field(default_factory=list)
    num_drafts: int = 0
    num_accepted: int = 0

    @property
    def rate(self) -> float:
        return statistics.median(self.rates)


def passages_of(llm: LLM) -> Iterator[str]:
    """The text in passages of equal length, again and again, each time cut at other places."""
    tokenizer = llm.engine.tokenizer
    tokens = tokenizer.encode(TEXT.read_text(), add_special_tokens=False)
    for start in itertools.count(0, PASSAGE_TOKENS + 7):
        first = start % (len(tokens) - PASSAGE_TOKENS)
        yield tokenizer.decode(tokens[first : first + PASSAGE_TOKENS])


def measure(engines: dict[str, LLM], passages: Iterator[str], kind: str, count: int, rounds: int) -> dict[str, Result]:
    """Answer the requests of each round with each method."""
    results = {method: Result() for method in engines}
    for _ in range(rounds):
        prompts = [prompt_of(kind, passage) for passage in itertools.islice(passages, count)]
        answers = {}
        for method, llm in engines.items():
            before = llm.engine.snapshot()
            answers[method] = llm.generate(prompts, [params_of(kind, seed) for seed in range(count)])
            after = llm.engine.snapshot()
            results[method].rates.append(decode_rate(answers[method]))
            results[method].num_drafts += after.draft_tokens - before.draft_tokens
            results[method].num_accepted += after.accepted_draft_tokens - before.accepted_draft_tokens
        for method, outputs in answers.items():
            if [o.token_ids for o in outputs] != [o.token_ids for o in answers[PLAIN]]:
                raise SystemExit(f"{method} answers otherwise than plain decoding")
    return results


def prompt_of(kind: str, passage: str) -> str:
    if kind == "free":
        return passage
    return f"Original text:\n\n{passage}\n\nThe same text once more, word for word:\n\n{passage[:20]}"


def params_of(kind: str, seed: int) -> SamplingParams:
    temperature = 1.0 if kind == "free" else 0.0
    return SamplingParams(temperature=temperature, seed=seed, max_tokens=PASSAGE_TOKENS - 8, ignore_eos=True)


def decode_rate(outputs: list[RequestOutput]) -> float:
    """Tokens a second from the moment when all requests have their first token."""
    started = max(output.stats.first_token_time or 0.0 for output in outputs)
    ended = max(output.stats.finished_time or 0.0 for output in outputs)
    return sum(len(output.token_ids) - 1 for output in outputs) / (ended - started)


def report(kind: str, count: int, results: dict[str, Result]) -> None:
    plain = results[PLAIN].rate
    for method, result in results.items():
        accepted = f"{result.num_accepted} of {result.num_drafts} accepted" if result.num_drafts else ""
        print(
            f"{kind:4} x{count:<3} {method:6} {result.rate:7.1f} tok/s ({min(result.rates):.0f} to "
            f"{max(result.rates):.0f}) {result.rate / plain:5.2f}  {accepted}",
            flush=True,
        )


if __name__ == "__main__":
    main()
