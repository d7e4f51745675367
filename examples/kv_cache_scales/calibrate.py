"""Write kv_cache_scales.json for a model, from the keys and values that it has for a text.

python examples/kv_cache_scales/calibrate.py --model demo some_text.txt
ksana-serve --model demo --kv-cache-dtype fp8_e4m3 --kv-cache-scales kv_cache_scales.json
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import recording_backend

from ksana import LLM, SamplingParams
from ksana.errors import UsageError

LARGEST_NUMBER = 448.0
"""Of float8_e4m3fn."""

HEADROOM = 2.0
"""Other texts have larger keys and values, which would be cut. It costs nothing: a float is as exact at half of it."""

PIECE_TOKENS = 512


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path, help="UTF-8 text like those that the model is to read; some thousand words")
    parser.add_argument("--model", default="demo", help="as of ksana-serve")
    parser.add_argument("--output", type=Path, default=Path("kv_cache_scales.json"), help="file to write")
    arguments = parser.parse_args()
    text = arguments.text.read_text(encoding="utf-8")
    with LLM(arguments.model, backend=recording_backend.NAME, plugins=("recording_backend",)) as llm:
        tokens = llm.engine.tokenizer.encode(text)
        pieces = [tokens[start : start + PIECE_TOKENS] for start in range(0, len(tokens), PIECE_TOKENS)]
        llm.generate(pieces, SamplingParams(max_tokens=1))
        model_type = llm.engine.model_config.architecture.removesuffix("ForCausalLM").lower()
    factors = {str(layer): HEADROOM * x / LARGEST_NUMBER for layer, x in sorted(recording_backend.largest.items())}
    content = {
        "model_type": model_type,
        "kv_cache": {"dtype": "float8_e4m3fn", "scaling_factor": {"0": factors}},
    }
    arguments.output.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    print(f"{len(factors)} layers, factors {min(factors.values()):.4f} to {max(factors.values()):.4f}")


if __name__ == "__main__":
    try:
        main()
    except (OSError, UnicodeDecodeError, UsageError) as error:
        sys.exit(f"calibrate.py: {error}")
