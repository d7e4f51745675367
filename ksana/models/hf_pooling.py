"""How a model pools, in the files of sentence-transformers: ``modules.json`` and ``1_Pooling/config.json``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ksana.errors import ModelLoadError
from ksana.models.json_file import read_json, read_json_object

MODULES_FILE = "modules.json"
DEFAULT_FOLDER = "1_Pooling"

DEFAULT_POOLING = "last"
"""Under causal attention the last token alone has seen the whole text."""

_HARMLESS_MODULES = ("Transformer", "Normalize")
_SUPPORTED_MODES = {"cls_token": "cls", "mean_tokens": "mean", "lasttoken": "last"}


def read_pooling(folder: Path) -> str:
    """The pooling of the model in ``folder``, as ``ModelConfig.pooling`` names it.

    Raises:
        ModelLoadError: a file cannot be read, or does not have the shape that it should.
    """
    pooling_folder = DEFAULT_FOLDER
    modules_file = folder / MODULES_FILE
    for module in _modules(modules_file) if modules_file.is_file() else ():
        kind = str(module.get("type", "")).rpartition(".")[2]
        if kind == "Pooling":
            pooling_folder = str(module.get("path") or DEFAULT_FOLDER)
        elif kind not in _HARMLESS_MODULES:
            return f"a module {kind}"
    config_file = folder / pooling_folder / "config.json"
    return _mode(read_json_object(config_file)) if config_file.is_file() else DEFAULT_POOLING


def _modules(path: Path) -> list[dict[str, Any]]:
    modules = read_json(path)
    if not isinstance(modules, list) or not all(isinstance(module, dict) for module in modules):
        raise ModelLoadError(f"{path}: must hold a list of JSON objects")
    return modules


def _mode(config: dict[str, Any]) -> str:
    """The one mode that is switched on; several at once are concatenated, which is a way of its own."""
    prefix = "pooling_mode_"
    modes = [name.removeprefix(prefix) for name, on in config.items() if name.startswith(prefix) and on is True]
    if not modes:
        return DEFAULT_POOLING
    return " and ".join(_SUPPORTED_MODES.get(mode, mode) for mode in modes)
