"""Perplexity of a model on a fixed text, for each way of keeping its weights, and its keys and values.

    python benchmarks/perplexity.py                          # the demo model, all ways
    python benchmarks/perplexity.py --model FOLDER --only bf16 int4-64
    python benchmarks/perplexity.py --only bf16 fp8_e4m3 fp8_e5m2 --kv-cache-scales kv_cache_scales.json

The text is cut into pieces of equal length, each a prompt of which the engine reports the log probability of each token
but the first. Perplexity is the exponential of the mean negative log probability: the lower the better; what matters
here is its distance from that of the first way. Weights are in bfloat16 where a way is named after its cache.
"""

from __future__ import annotations

import argparse
import logging
import math
import sys
import time
from pathlib import Path
from typing import Any

from ksana import LLM, SamplingParams
from ksana.errors import UsageError

TEXT = Path(__file__).parent / "data" / "opticks.txt"

WAYS: dict[str, dict[str, Any]] = {
    "f32": {"dtype": "float32"},
    "bf16": {"dtype": "bfloat16"},
    "stored f32": {"dtype": "float32", "quantization": "stored"},
    "stored bf16": {"dtype": "bfloat16", "quantization": "stored"},
    "int8-64": {"dtype": "bfloat16", "quantization": "int8", "quantization_group_size": 64},
    "int8-128": {"dtype": "bfloat16", "quantization": "int8", "quantization_group_size": 128},
    "int4-64": {"dtype": "bfloat16", "quantization": "int4", "quantization_group_size": 64},
    "int4-128": {"dtype": "bfloat16", "quantization": "int4", "quantization_group_size": 128},
    "fp8_e4m3": {"dtype": "bfloat16", "kv_cache_dtype": "fp8_e4m3"},
    "fp8_e5m2": {"dtype": "bfloat16", "kv_cache_dtype": "fp8_e5m2"},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo", help="as of ksana-serve; stored is for GGUF files")
    parser.add_argument("--text", type=Path, default=TEXT, help="UTF-8 text to score")
    parser.add_argument("--length", type=int, default=512, help="tokens of a piece")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads; 0: all")
    parser.add_argument("--backend", default="auto", help="as of ksana-serve")
    parser.add_argument("--kv-cache-scales", default="", metavar="FILE", help="as of ksana-serve, for fp8_e4m3")
    parser.add_argument("--only", nargs="+", choices=WAYS, default=list(WAYS), metavar="WAY", help=", ".join(WAYS))
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    text = arguments.text.read_text(encoding="utf-8")
    first = None
    print("| way | perplexity | to the first | tokens | seconds |\n|---|---|---|---|---|")
    for way in arguments.only:
        start = time.monotonic()
        options = {**WAYS[way], "threads": arguments.threads, "backend": arguments.backend}
        if options.get("kv_cache_dtype") == "fp8_e4m3":
            options["kv_cache_scales"] = arguments.kv_cache_scales
        perplexity, num_tokens = measure(arguments.model, text, arguments.length, options)
        first = first or perplexity
        ratio, seconds = perplexity / first - 1, time.monotonic() - start
        print(f"| {way} | {perplexity:.3f} | {ratio:+.2%} | {num_tokens} | {seconds:.0f} |", flush=True)


def measure(model: str, text: str, length: int, options: dict[str, Any]) -> tuple[float, int]:
    """(perplexity, tokens scored)."""
    limits = {"num_blocks": 4 * length, "max_num_seqs": 1, "max_num_batched_tokens": length}
    with LLM(model, **limits, **options) as llm:
        tokens = llm.engine.tokenizer.encode(text)
        pieces = [tokens[start : start + length] for start in range(0, len(tokens), length)]
        outputs = llm.generate(
            [piece for piece in pieces if len(piece) > 1], SamplingParams(max_tokens=0, prompt_logprobs=0)
        )
    logprobs = [entry.logprob for output in outputs for entry in output.prompt_logprobs if entry is not None]
    return math.exp(-sum(logprobs) / len(logprobs)), len(logprobs)


if __name__ == "__main__":
    try:
        main()
    except UsageError as error:
        sys.exit(f"perplexity.py: {error}")
