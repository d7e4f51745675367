"""Engines with quantised weights: the tokens of the plain model that has the same numbers."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from ksana import LLM, SamplingParams
from ksana.errors import UsageError
from ksana.kernels.quantization import quantize

GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
PROMPTS = [[5, 9, 200, 31], [400, 3, 77] * 9, [12], list(range(100, 150))]


def with_rounded_weights(folder: Path, target: Path, bits: int, group_size: int) -> Path:
    """The model with what quantising leaves of its projections; the head, if it is the embedding, as one of its own."""
    shutil.copytree(folder, target)
    weights = load_file(folder / "model.safetensors")
    head = weights.get("lm_head.weight", weights["model.embed_tokens.weight"])
    weights["lm_head.weight"] = head.clone()
    for name, weight in weights.items():
        if "_proj.weight" in name or name == "lm_head.weight":
            bits_here = 8 if name == "lm_head.weight" else bits
            weights[name] = quantize(weight, bits_here, group_size, torch.float32).dequantize()
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    config = target / "config.json"
    config.write_text(config.read_text().replace('"tie_word_embeddings": true', '"tie_word_embeddings": false'))
    return target


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("kind", "bits", "group_size"), [("int8", 8, 64), ("int4", 4, 64), ("int4", 4, 128)])
def test_greedy_tokens(
    tiny_path: Callable[..., Path],
    start_llm: Callable[..., LLM],
    tmp_path: Path,
    kind: str,
    bits: int,
    group_size: int,
    tied: bool,
) -> None:
    folder = tiny_path("qwen2", tie_word_embeddings=tied)
    plain = start_llm(with_rounded_weights(folder, tmp_path / "rounded", bits, group_size), dtype="float32")
    expected = [output.token_ids for output in plain.generate(PROMPTS, GREEDY)]
    quantised = start_llm(folder, dtype="float32", quantization=kind, quantization_group_size=group_size)
    assert [output.token_ids for output in quantised.generate(PROMPTS, GREEDY)] == expected
    assert [quantised.generate(prompt, GREEDY)[0].token_ids for prompt in PROMPTS] == expected


def test_demo_with_its_own_integers(start_llm: Callable[..., LLM]) -> None:
    """In float32 they give the tokens of the unpacked model."""
    prompts = ["The capital of France is", "Once upon a time, in a village by the sea,", "1, 2, 3, 4,"]
    answers = [
        [output.text for output in start_llm("demo", dtype="float32", quantization=kind).generate(prompts, GREEDY)]
        for kind in ("none", "stored")
    ]
    assert answers[1] == answers[0]


def test_plain_files_hold_nothing_to_keep(tiny_path: Callable[..., Path]) -> None:
    with pytest.raises(UsageError, match=r"quantization stored is for GGUF files.*int8 or int4"):
        LLM(tiny_path(), quantization="stored")


@pytest.mark.parametrize("size", [48, 16, 512])
def test_group_sizes_are_checked(tiny_path: Callable[..., Path], size: int) -> None:
    with pytest.raises(UsageError, match="quantization_group_size"):
        LLM(tiny_path(), quantization="int4", quantization_group_size=size)
