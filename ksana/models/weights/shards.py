"""The index files that spread a model's tensors over several weight files."""

from __future__ import annotations

import json
from pathlib import Path

from ksana.errors import ModelLoadError


def find_weight_files(folder: Path, single_file: str, index_file: str) -> list[Path]:
    """The files that the index names, else the single file; empty if the folder has neither.

    Raises:
        ModelLoadError: the index is damaged, or one of its shards is missing.
    """
    if (folder / index_file).is_file():
        return read_shard_index(folder / index_file)
    return [folder / single_file] if (folder / single_file).is_file() else []


def read_shard_index(index: Path) -> list[Path]:
    """Weight files named by a ``*.index.json``, in order.

    Raises:
        ModelLoadError: the index is no such file, or one of its shards is missing.
    """
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        names = sorted(set(weight_map.values()))
        valid = bool(names) and all(isinstance(name, str) and Path(name).name == name for name in names)
    except KeyError as error:
        raise ModelLoadError(f"{index}: not an index of weight files: it holds no weight_map") from error
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ModelLoadError(f"{index}: not an index of weight files: {error!r}") from error
    if not valid:
        raise ModelLoadError(f"{index}: weight_map must name files of the same folder")
    shards = [index.parent / name for name in names]
    missing = [shard.name for shard in shards if not shard.is_file()]
    if missing:
        raise ModelLoadError(
            f"{index}: {len(missing)} of {len(shards)} weight files are missing, for example {missing[0]}; "
            "download the model again"
        )
    return shards
