"""Factors of an eight bit cache: what file is taken, and what is said about one that cannot be used."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from ksana.errors import UsageError
from ksana.models.kv_scales import KV_SCALES_FILE, load_kv_scales
from ksana.types.config import CacheConfig

E4M3 = CacheConfig(kv_cache_dtype="fp8_e4m3")


def write(folder: Path, factors: Any, name: str = KV_SCALES_FILE, **kv_cache: Any) -> Path:
    """A file as the original engine has it."""
    path = folder / name
    content = {"dtype": "float8_e4m3fn", "scaling_factor": factors, **kv_cache}
    path.write_text(json.dumps({"model_type": "llama", "kv_cache": content}))
    return path


def test_factors_are_in_the_order_of_layers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Not in the order of the file, nor in that of their names."""
    write(tmp_path, {"0": {str(layer): (layer + 1) / 8 for layer in reversed(range(11))}})
    assert load_kv_scales(tmp_path, E4M3, 11) == tuple((layer + 1) / 8 for layer in range(11))
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_beside_a_model_file(tmp_path: Path) -> None:
    write(tmp_path, {"0": {"0": 0.5}})
    model = tmp_path / "model.gguf"
    model.touch()
    assert load_kv_scales(model, E4M3, 1) == (0.5,)


def test_a_named_file_comes_before_that_of_the_folder(tmp_path: Path) -> None:
    write(tmp_path, {"0": {"0": 0.5}})
    named = write(tmp_path, {"0": {"0": 0.25}}, name="mine.json")
    cache = CacheConfig(kv_cache_dtype="fp8_e4m3", kv_cache_scales=str(named))
    assert load_kv_scales(tmp_path, cache, 1) == (0.25,)


@pytest.mark.parametrize("dtype", ["auto", "fp8_e5m2"])
def test_other_caches_have_no_factors(tmp_path: Path, dtype: Any) -> None:
    """The range of e5m2 is wide enough; and a damaged file is nothing to them."""
    (tmp_path / KV_SCALES_FILE).write_text("{")
    assert load_kv_scales(tmp_path, CacheConfig(kv_cache_dtype=dtype), 1) == ()
    with pytest.raises(UsageError, match="--kv-cache-scales is for --kv-cache-dtype fp8_e4m3 alone"):
        load_kv_scales(tmp_path, CacheConfig(kv_cache_dtype=dtype, kv_cache_scales="x.json"), 1)


def test_without_a_file_all_are_one_and_a_warning_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert load_kv_scales(tmp_path, E4M3, 2) == ()
    [record] = caplog.records
    assert record.levelno == logging.WARNING
    assert str(tmp_path / KV_SCALES_FILE) in record.getMessage()


@pytest.mark.parametrize("num_layers", [1, 3])
def test_for_another_number_of_layers_all_are_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, num_layers: int
) -> None:
    path = write(tmp_path, {"0": {"0": 0.5, "1": 0.5}})
    assert load_kv_scales(tmp_path, E4M3, num_layers) == ()
    assert f"{path} has factors for 2 layers, and the model has {num_layers}" in caplog.text


def test_factors_of_other_ranks_are_left_out_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path, {"1": {"0": 0.25}, "0": {"0": 0.5}})
    assert load_kv_scales(tmp_path, E4M3, 1) == (0.5,)
    assert "only the factors of rank 0 are used" in caplog.text


@pytest.mark.parametrize(
    ("factors", "message"),
    [
        ({"0": {"0": 0.5, "2": 0.5}}, "has no factor for layer 1"),
        ({"1": {"0": 0.5, "1": 0.5}}, "kv_cache.scaling_factor: has no factors of rank 0"),
        ({"0": {"0": 0.5, "1": 0}}, "kv_cache.scaling_factor.0.1: Input should be greater than"),
        ({"0": {"0": 0.5, "1": -1.0}}, "kv_cache.scaling_factor.0.1: Input should be greater than"),
        ({"0": {"0": 0.5, "1": float("nan")}}, "kv_cache.scaling_factor.0.1: Input should be"),
        ({"0": {"0": 0.5, "1": float("inf")}}, "kv_cache.scaling_factor.0.1: Input should be less than"),
        ({"0": {"0": 0.5, "1": "0.5"}}, "kv_cache.scaling_factor.0.1: Input should be a valid number"),
        ({"0": {"0": 0.5, "one": 0.5}}, "kv_cache.scaling_factor.0.one"),
        ({"0": [0.5, 0.5]}, "kv_cache.scaling_factor.0: Input should be a valid dictionary"),
        (None, "kv_cache.scaling_factor: Input should be a valid dictionary"),
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, factors: Any, message: str) -> None:
    path = write(tmp_path, factors)
    with pytest.raises(UsageError) as caught:
        load_kv_scales(tmp_path, E4M3, 2)
    assert str(caught.value).startswith(f"{path}: {message}")


def test_a_file_for_another_dtype_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, {"0": {"0": 0.5}}, dtype="int8")
    with pytest.raises(UsageError, match=f"{path}: kv_cache.dtype: Input should be 'float8_e4m3fn'"):
        load_kv_scales(tmp_path, E4M3, 1)


@pytest.mark.parametrize("content", ["{", "[]", "null", '{"model_type": "llama"}'])
def test_what_is_no_such_file_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / KV_SCALES_FILE
    path.write_text(content)
    with pytest.raises(UsageError, match=str(path)):
        load_kv_scales(tmp_path, E4M3, 1)


def test_a_named_file_must_exist(tmp_path: Path) -> None:
    cache = CacheConfig(kv_cache_dtype="fp8_e4m3", kv_cache_scales=str(tmp_path / "missing.json"))
    with pytest.raises(UsageError, match=r"missing\.json: no such file"):
        load_kv_scales(tmp_path, cache, 1)
