from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ksana.errors import ModelLoadError
from ksana.models.hf_pooling import read_pooling

TRANSFORMER = {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}
POOLING = {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}
NORMALIZE = {"idx": 2, "name": "2", "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"}
DENSE = {"idx": 2, "name": "2", "path": "2_Dense", "type": "sentence_transformers.models.Dense"}


def write(folder: Path, modules: Any = None, *modes: str, pooling_folder: str = "1_Pooling") -> Path:
    if modules is not None:
        (folder / "modules.json").write_text(json.dumps(modules))
    if modes:
        names = ("cls_token", "mean_tokens", "max_tokens", "lasttoken")
        config = {"word_embedding_dimension": 64, **{f"pooling_mode_{name}": name in modes for name in names}}
        (folder / pooling_folder).mkdir()
        (folder / pooling_folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("modes", "pooling"),
    [
        ((), "last"),
        (("lasttoken",), "last"),
        (("mean_tokens",), "mean"),
        (("cls_token",), "cls"),
        (("max_tokens",), "max_tokens"),
        (("cls_token", "mean_tokens"), "cls and mean"),
    ],
)
@pytest.mark.parametrize("modules", [None, [TRANSFORMER, POOLING, NORMALIZE]])
def test_the_mode_that_is_switched_on(tmp_path: Path, modules: Any, modes: tuple[str, ...], pooling: str) -> None:
    assert read_pooling(write(tmp_path, modules, *modes)) == pooling


def test_modules_say_where_the_pooling_is(tmp_path: Path) -> None:
    modules = [TRANSFORMER, {**POOLING, "path": "pool"}]
    assert read_pooling(write(tmp_path, modules, "mean_tokens", pooling_folder="pool")) == "mean"


def test_a_module_that_changes_vectors_is_not_overlooked(tmp_path: Path) -> None:
    assert "Dense" in read_pooling(write(tmp_path, [TRANSFORMER, POOLING, DENSE], "mean_tokens"))


@pytest.mark.parametrize("modules", [{}, [1], "x"])
def test_damaged_files_are_named(tmp_path: Path, modules: Any) -> None:
    with pytest.raises(ModelLoadError, match=r"modules\.json"):
        read_pooling(write(tmp_path, modules))
