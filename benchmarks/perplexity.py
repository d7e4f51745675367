"""Perplexity of a model on a fixed text, for each way of keeping its weights.

    python benchmarks/perplexity.py                          # the demo model, all ways
    python benchmarks/perplexity.py --model FOLDER --only bf16 int4-64

The text is cut into pieces of equal length, each computed by the engine's own runner as the prompt of a request, and
every token but a piece's first is scored by the logits before it. Perplexity is the exponential of the mean negative
log probability: the lower the better; what matters here is its distance from that of the plain weights.
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
import math
import sys
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import torch

from ksana import hookimpl
from ksana.engine.assembly import EngineParts, assemble
from ksana.engine.keywords import configure
from ksana.errors import UsageError
from ksana.kernels.batch import ModelInputs, StepContext
from ksana.models.base import Model
from ksana.types.kv import cdiv
from ksana.types.sampling import SamplingParams
from ksana.types.step import NewRequestData, SchedulerOutput

TEXT = Path(__file__).parent / "data" / "opticks.txt"
LOGITS_ROWS = 128

WAYS: dict[str, dict[str, Any]] = {
    "f32": {"dtype": "float32"},
    "bf16": {"dtype": "bfloat16"},
    "stored f32": {"dtype": "float32", "quantization": "stored"},
    "stored bf16": {"dtype": "bfloat16", "quantization": "stored"},
    "int8-64": {"dtype": "bfloat16", "quantization": "int8", "quantization_group_size": 64},
    "int8-128": {"dtype": "bfloat16", "quantization": "int8", "quantization_group_size": 128},
    "int4-64": {"dtype": "bfloat16", "quantization": "int4", "quantization_group_size": 64},
    "int4-128": {"dtype": "bfloat16", "quantization": "int4", "quantization_group_size": 128},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo", help="as of ksana-serve; stored is for GGUF files")
    parser.add_argument("--text", type=Path, default=TEXT, help="UTF-8 text to score")
    parser.add_argument("--length", type=int, default=512, help="tokens of a piece")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads; 0: all")
    parser.add_argument("--only", nargs="+", choices=WAYS, default=list(WAYS), metavar="WAY", help=", ".join(WAYS))
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    text = arguments.text.read_text(encoding="utf-8")
    first = None
    print("| weights | perplexity | to the first | tokens | seconds |\n|---|---|---|---|---|")
    for way in arguments.only:
        start = time.monotonic()
        perplexity, num_tokens = measure(arguments.model, text, arguments.length, arguments.threads, WAYS[way])
        first = first or perplexity
        ratio, seconds = perplexity / first - 1, time.monotonic() - start
        print(f"| {way} | {perplexity:.3f} | {ratio:+.2%} | {num_tokens} | {seconds:.0f} |", flush=True)


def measure(model: str, text: str, length: int, threads: int, options: dict[str, Any]) -> tuple[float, int]:
    """(perplexity, tokens scored)."""
    blocks = {"num_blocks": 4 * length, "max_num_seqs": 1, "max_num_batched_tokens": length}
    config, plugins = configure("perplexity.py", model, {**options, **blocks, "threads": threads})
    kept = KeepHiddenStates()
    plugins.register(kept, "keep_hidden_states")
    parts = assemble(config, plugins)
    tokens = parts.context.tokenizer.encode(text)
    pieces = [tokens[start : start + length] for start in range(0, len(tokens), length)]
    scores = [token_logprobs(parts, kept.model, piece, number) for number, piece in enumerate(pieces) if len(piece) > 1]
    logprobs = torch.cat(scores).double()
    return math.exp(-logprobs.mean().item()), len(logprobs)


@torch.inference_mode()
def token_logprobs(parts: EngineParts, model: KeptModel, tokens: list[int], number: int) -> torch.Tensor:
    """Log probability of each token after the first, [len(tokens) - 1]."""
    kv_config = parts.core.scheduler.kv.config
    count = cdiv(len(tokens), kv_config.block_size)
    # Nobody else is here, so all blocks are free but the null block, which is 0.
    blocks = tuple(list(range(1 + i * count, 1 + (i + 1) * count)) for i in range(len(kv_config.groups)))
    request = NewRequestData(str(number), tokens, 0, blocks, SamplingParams(temperature=0.0), seed=0)
    removed = [str(number - 1)] if number else []
    parts.runner.execute(SchedulerOutput({request.request_id: len(tokens)}, [request], removed_request_ids=removed))
    scores = []
    for start in range(0, len(tokens) - 1, LOGITS_ROWS):
        next_tokens = torch.tensor(tokens[start + 1 : start + 1 + LOGITS_ROWS])
        logits = model.compute_logits(model.hidden[start : start + len(next_tokens)])
        scores.append(logits.log_softmax(dim=-1).gather(-1, next_tokens[:, None])[:, 0])
    return torch.cat(scores)


class KeptModel:
    """A model that keeps the hidden states of the last step for all its tokens, not only for those to be sampled."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self.hidden = torch.empty(0)

    def forward(self, inputs: ModelInputs, context: StepContext) -> torch.Tensor:
        rows = torch.arange(len(inputs.token_ids))
        self.hidden = self._model.forward(dataclasses.replace(inputs, output_rows=rows), context)
        return self.hidden[inputs.output_rows]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


class KeepHiddenStates:
    """The plugin that puts :class:`KeptModel` around the model."""

    model: KeptModel

    @hookimpl(wrapper=True)
    def ksana_create_model(self) -> Generator[None, Model, KeptModel]:
        self.model = KeptModel((yield))
        return self.model


if __name__ == "__main__":
    try:
        main()
    except UsageError as error:
        sys.exit(f"perplexity.py: {error}")
