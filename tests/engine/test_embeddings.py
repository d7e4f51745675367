"""Embeddings are the pooled states of transformers, whatever else is in the batch."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from ksana import LLM, SamplingParams
from ksana.engine.embedding import Embedder
from ksana.errors import RequestError
from ksana.types.request import RequestDraft

PROMPTS = [[(3 * i + shift) % 60 for i in range(45)] for shift in range(6)] + [[7]]

MODES = {"last": "lasttoken", "mean": "mean_tokens", "cls": "cls_token"}


@pytest.fixture
def states(tiny_path: Callable[..., Path]) -> list[np.ndarray]:
    """For each prompt the states after the final norm."""
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_path(), dtype=torch.float32)
    with torch.inference_mode():
        return [model.model(torch.tensor([prompt])).last_hidden_state[0].double().numpy() for prompt in PROMPTS]


@pytest.fixture
def pooled_path(tiny_path: Callable[..., Path], tmp_path: Path) -> Callable[[str], Path]:
    """The tiny model with a pooling of sentence-transformers."""

    def make(mode: str) -> Path:
        folder = tmp_path / mode
        shutil.copytree(tiny_path(), folder)
        (folder / "1_Pooling").mkdir()
        (folder / "1_Pooling" / "config.json").write_text(json.dumps({f"pooling_mode_{mode}": True}))
        return folder

    return make


@pytest.mark.parametrize("pooling", ["last", "mean", "cls"])
@pytest.mark.parametrize("options", [{}, {"split_fuse_token_num": 7, "num_blocks": 14}])
def test_vectors_are_pooled_states_of_unit_length(
    pooled_path: Callable[[str], Path],
    start_llm: Callable[..., LLM],
    states: list[np.ndarray],
    pooling: str,
    options: dict[str, int],
) -> None:
    """The second time prompts are in the cache; few blocks make requests give way in the middle of a prompt."""
    pool = {"last": lambda rows: rows[-1], "mean": lambda rows: rows.mean(axis=0), "cls": lambda rows: rows[0]}[pooling]
    expected = np.array([pool(rows) for rows in states])
    llm = start_llm(pooled_path(MODES[pooling]), dtype="float32", **options)
    for dimensions in (None, None, 5):
        cut = expected[:, :dimensions]
        found = llm.embed(PROMPTS, dimensions=dimensions)
        assert found.dtype == np.float32
        np.testing.assert_allclose(found, cut / np.linalg.norm(cut, axis=1, keepdims=True), atol=1e-4)


def test_a_mean_begins_anew_after_a_preemption(
    pooled_path: Callable[[str], Path], tiny_path: Callable[..., Path], start_llm: Callable[..., LLM]
) -> None:
    """Three texts grow while a prompt is computed by two tokens a step, until it has to give way."""
    prompt = [(7 * i) % 60 for i in range(90)]
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_path(), dtype=torch.float32)
    with torch.inference_mode():
        mean = model.model(torch.tensor([prompt])).last_hidden_state[0].mean(dim=0).numpy()
    few = {"num_blocks": 14, "split_fuse_token_num": 2, "launch_block_threshold": 1}
    llm = start_llm(pooled_path("mean_tokens"), dtype="float32", **few)
    embedder = Embedder(llm.engine.model_config)
    sampling = SamplingParams(max_tokens=60, ignore_eos=True)
    texts = [RequestDraft(prompt_token_ids=[token] * 5, sampling=sampling, final_only=True) for token in (5, 6, 7)]
    *_, output = llm._run(llm._complete([*texts, embedder.draft(prompt)], progress=False))
    assert output.stats.num_preemptions > 0
    np.testing.assert_allclose(embedder.vector(output), mean / np.linalg.norm(mean), atol=1e-4)


def test_one_text_is_a_batch_and_none_is_an_empty_one(
    tiny_path: Callable[..., Path], start_llm: Callable[..., LLM]
) -> None:
    llm = start_llm(tiny_path())
    assert llm.embed("The quick brown fox").shape == (1, 64)
    assert llm.embed([]).shape == (0, 64)
    with pytest.raises(RequestError, match="dimensions must be from 1 to 64"):
        llm.embed("The quick brown fox", dimensions=65)


def test_another_way_of_pooling_is_refused_by_name(
    pooled_path: Callable[[str], Path], start_llm: Callable[..., LLM]
) -> None:
    llm = start_llm(pooled_path("max_tokens"))
    with pytest.raises(RequestError, match="max_tokens, which is not supported"):
        llm.embed("The quick brown fox")


def test_a_file_of_the_decoder_alone_is_read(
    tiny_path: Callable[..., Path], start_llm: Callable[..., LLM], tmp_path: Path
) -> None:
    """Embedding models are saved so; the names of their weights lack a prefix."""
    whole = tiny_path("qwen3", tie_word_embeddings=True)
    transformers.AutoModel.from_pretrained(whole).save_pretrained(tmp_path)
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(whole / name, tmp_path)
    options = {"dtype": "float32"}
    np.testing.assert_array_equal(
        start_llm(tmp_path, **options).embed(PROMPTS), start_llm(whole, **options).embed(PROMPTS)
    )
