"""JSON files of model folders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ksana.errors import ModelLoadError


def read_json(path: Path) -> Any:
    """Parse the file ``path``.

    Raises:
        ModelLoadError: there is no such file, or it holds no JSON.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelLoadError(f"{path}: no such file") from error
    except (OSError, ValueError, RecursionError) as error:
        raise ModelLoadError(f"{path}: cannot be read as JSON: {error}") from error


def read_json_object(path: Path) -> dict[str, Any]:
    """The same for a file that must hold an object."""
    raw = read_json(path)
    if not isinstance(raw, dict):
        raise ModelLoadError(f"{path}: must hold a JSON object, not {type(raw).__name__}")
    return raw
