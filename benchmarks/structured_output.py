"""What structured output costs: decode rate with a JSON schema against that without.

    python benchmarks/structured_output.py [--model demo] [--concurrency 1 8] [--threads 2]

Both write the same number of tokens, greedily and by sampling: the schema is an array so long that no answer ends.
The two take turns; the fastest round counts.
"""

from __future__ import annotations

import argparse
import json
import time

from ksana import LLM, SamplingParams
from ksana.types.grammar import GrammarSpec

SCHEMA = {
    "type": "array",
    "minItems": 1000,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string"},
            "age": {"type": "integer", "minimum": 0},
            "city": {"enum": ["Paris", "London", "Rome"]},
            "tags": {"type": "array", "items": {"type": "string", "maxLength": 20}, "maxItems": 4},
        },
        "required": ["name", "age", "city"],
        "additionalProperties": False,
    },
}
PROMPT = "A list of people, with their names, ages, cities and some tags, in JSON:\n"
NUM_TOKENS = 128
ROUNDS = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--threads", type=int, default=0)
    options = parser.parse_args()
    grammar = GrammarSpec("json_schema", json.dumps(SCHEMA))
    with LLM(options.model, threads=options.threads) as llm:
        for concurrency in options.concurrency:
            for temperature in (0.0, 1.0):
                plain = SamplingParams(max_tokens=NUM_TOKENS, temperature=temperature, seed=1, ignore_eos=True)
                bound = SamplingParams(max_tokens=NUM_TOKENS, temperature=temperature, seed=1, grammar=grammar)
                free_s, bound_s = fastest(llm, concurrency, [plain, bound])
                rates = [concurrency * NUM_TOKENS / seconds for seconds in (free_s, bound_s)]
                print(
                    f"{concurrency} at a time, temperature {temperature}: {rates[0]:.0f} tokens/s, "
                    f"with a schema {rates[1]:.0f} ({1 - rates[1] / rates[0]:.1%} less)"
                )


def fastest(llm: LLM, concurrency: int, kinds: list[SamplingParams]) -> list[float]:
    """Seconds of a batch of each kind."""
    best = [float("inf")] * len(kinds)
    for _ in range(ROUNDS):
        for index, sampling in enumerate(kinds):
            started = time.perf_counter()
            outputs = llm.generate([PROMPT] * concurrency, sampling, progress=False)
            best[index] = min(best[index], time.perf_counter() - started)
            assert all(len(output.token_ids) == NUM_TOKENS for output in outputs)
    return best


if __name__ == "__main__":
    main()
