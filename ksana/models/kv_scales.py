"""The factors of an fp8_e4m3 cache's keys and values, from a file in the model's folder.

The file, ``kv_cache_scales.json``, looks like this (the outer key is a tensor-parallel rank, the inner one a layer)::

    {"model_type": "llama", "kv_cache": {"dtype": "float8_e4m3fn", "scaling_factor": {"0": {"0": 0.0123, "1": 0.0107}}}}

A key or value x is stored as x / factor.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, Field, NonNegativeInt, ValidationError

from ksana.errors import ModelLoadError, UsageError
from ksana.models.json_file import read_json_object
from ksana.types.config import CacheConfig

logger = logging.getLogger(__name__)

KV_SCALES_FILE = "kv_cache_scales.json"

_RANK = 0
_UNSCALED = "keys and values are stored as they are, and cut to 448"

_Factor = Annotated[float, Field(strict=True, ge=1e-30, le=1e30)]
"""What kernels can divide by in float32."""


class _KVCacheScales(BaseModel):
    dtype: Literal["float8_e4m3fn"]
    scaling_factor: dict[NonNegativeInt, dict[NonNegativeInt, _Factor]]


class _ScalesFile(BaseModel):
    kv_cache: _KVCacheScales


def load_kv_scales(model_path: Path, cache: CacheConfig, num_layers: int) -> tuple[float, ...]:
    """The factor of each layer's keys and values.

    Args:
        model_path: the model's folder, or its file, beside which the factors are then.
        cache: its dtype, and the file if it is elsewhere.
        num_layers: of the model.

    Returns:
        One factor a layer; empty if all are 1: for other dtypes, and, with a warning, if there is no such file or if it
        is for another number of layers.

    Raises:
        UsageError: the file is damaged, or is not where it was said to be.
    """
    if cache.kv_cache_dtype != "fp8_e4m3":
        if cache.kv_cache_scales:
            raise UsageError("--kv-cache-scales is for --kv-cache-dtype fp8_e4m3 alone")
        return ()
    folder = model_path if model_path.is_dir() else model_path.parent
    path = Path(cache.kv_cache_scales).expanduser() if cache.kv_cache_scales else folder / KV_SCALES_FILE
    if not cache.kv_cache_scales and not path.exists():
        logger.warning("there is no %s: %s", path, _UNSCALED)
        return ()
    factors = _read(path)
    if len(factors) != num_layers:
        logger.warning(
            "%s has factors for %d layers, and the model has %d: %s", path, len(factors), num_layers, _UNSCALED
        )
        return ()
    if factors.keys() != set(range(num_layers)):
        missing = next(layer for layer in range(num_layers) if layer not in factors)
        raise ModelLoadError(f"{path}: has no factor for layer {missing}")
    logger.info("keys and values are scaled by the factors in %s", path)
    return tuple(factors[layer] for layer in range(num_layers))


def _read(path: Path) -> dict[int, float]:
    """Factors by layer."""
    try:
        ranks = _ScalesFile.model_validate(read_json_object(path)).kv_cache.scaling_factor
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise ModelLoadError(f"{path}: {place}: {first['msg']}") from None
    if _RANK not in ranks:
        raise ModelLoadError(f"{path}: kv_cache.scaling_factor: has no factors of rank {_RANK}")
    if len(ranks) > 1:
        logger.warning("%s: only the factors of rank %d are used", path, _RANK)
    return ranks[_RANK]
