"""An engine on a tiny model, and transformers on the same weights as the oracle."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from ksana import LLM
from ksana.testing import tiny_model
from ksana.types.output import RequestOutput


@dataclasses.dataclass(frozen=True)
class Oracle:
    """A transformers model.

    A greedy answer is checked with one forward over prompt and answer: it is what greedy decoding would have given if
    each of its tokens is the likeliest after all before it.
    """

    model: Any

    @torch.inference_mode()
    def greedy_after(self, output: RequestOutput) -> list[int]:
        """The likeliest token at each place of the output, given everything before it."""
        ids = torch.tensor([output.prompt_token_ids + output.token_ids])
        logits = self.model(ids).logits[0]
        return logits[len(output.prompt_token_ids) - 1 : -1].argmax(-1).tolist()

    @torch.inference_mode()
    def generate(self, prompt: list[int], count: int) -> list[int]:
        """What ``generate`` gives, end-of-sequence ignored."""
        ids = torch.tensor([prompt])
        output = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=count,
            min_new_tokens=count,
            pad_token_id=0,
        )
        return output[0, len(prompt) :].tolist()


def load_oracle(path: Path) -> Oracle:
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    return Oracle(model.eval())


@pytest.fixture(scope="session")
def tiny_path(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Folder of a tiny model; made once for equal arguments."""

    @cache
    def make(key: tuple[tuple[str, str], ...], architecture: str) -> Path:
        overrides = {name: eval(value) for name, value in key}
        return tiny_model(tmp_path_factory.mktemp(architecture), architecture, **overrides)

    def tiny(architecture: str = "llama", **overrides: Any) -> Path:
        return make(tuple((name, repr(value)) for name, value in sorted(overrides.items())), architecture)

    return tiny


@pytest.fixture
def start_llm() -> Iterator[Callable[..., LLM]]:
    """Start an offline engine that verifies its blocks whenever it is idle; at the end no block may be missing."""
    started: list[tuple[LLM, int]] = []

    def start(model: Path | str, **options: Any) -> LLM:
        llm = LLM(str(model), **{"check_integrity": True, "threads": 1, "num_blocks": 200, **options})
        started.append((llm, llm.engine.num_free_blocks))
        return llm

    yield start
    for llm, free_at_start in started:
        llm.close()
        assert llm.engine.num_unfinished() == 0
        assert llm.engine.num_free_blocks == free_at_start
