"""The plugin of a model's folder: ``ksana_plugin.py`` with a class ``KsanaPlugin``.

It is code out of a downloaded folder, so it runs only when the operator trusts it.
"""

from __future__ import annotations

import difflib
import inspect
import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ksana.errors import PluginLoadError, UsageError
from ksana.plugin.import_file import import_file
from ksana.plugin.manager import KsanaPluginManager, check_api_number
from ksana.plugin.messages import describe_cause
from ksana.plugin.model_dir_adapter import METHOD_KEYWORDS, ModelDirAdapter, PluginThreads
from ksana.types.config import ModelOptions

logger = logging.getLogger(__name__)

FILE_NAME = "ksana_plugin.py"
CLASS_NAME = "KsanaPlugin"
PLUGIN_NAME = "model-folder"

_TYPO_RATIO = 0.85
"""Similarity above which a method is taken for a misspelt one of the contract, not for a helper."""


@dataclass(frozen=True, slots=True)
class ModelDirPlugin:
    """A trusted plugin file that was found, and what it needs. Picklable.

    Attributes:
        file: the ``ksana_plugin.py``.
        config_file: the YAML file of this start, or an empty string; handed to ``init_plugin``.
        thread_pool_size: threads that run it. With 1, calls never overlap.
    """

    file: Path
    config_file: str = ""
    thread_pool_size: int = 1


def find_model_dir_plugin(model_path: Path, options: ModelOptions, config_file: str = "") -> ModelDirPlugin | None:
    """Look for a plugin in the folder ``model_path``; without trust, say in one line that it was not loaded."""
    file = model_path / FILE_NAME
    if not model_path.is_dir() or not file.is_file():
        return None
    if not options.trust_remote_code:
        logger.warning("found %s but did not load it: it is code; if you trust it, pass --trust-remote-code", file)
        return None
    return ModelDirPlugin(file.absolute(), config_file, options.plugin_thread_pool_size)


def register_model_dir_plugin(manager: KsanaPluginManager, found: ModelDirPlugin) -> None:
    """Import the plugin, run its ``init_plugin`` and register it, last and therefore called first.

    Its ``preprocess`` and ``postprocess`` run behind an adapter in threads of their own. Methods that carry the
    ``hookimpl`` mark are ordinary hooks: they run on the caller's thread.

    Raises:
        PluginLoadError: the file does not import, lacks the class, or ``init_plugin`` raises.
    """
    module = import_file(found.file)
    plugin_class = getattr(module, CLASS_NAME, None)
    if not inspect.isclass(plugin_class):
        raise PluginLoadError(f"{found.file} defines no class {CLASS_NAME}")
    label = f"plugin {found.file}"
    for carrier in (module, plugin_class):
        check_api_number(carrier, label)
    threads = PluginThreads(found.thread_pool_size)
    try:
        plugin = threads.submit(_create, plugin_class, found).result()
        manager.register(ModelDirAdapter(plugin, found.file, threads), f"{PLUGIN_NAME}-adapter")
        manager.register(plugin, PLUGIN_NAME, distribution=str(found.file))
        manager.check_pending()
    except (Exception, SystemExit) as error:
        threads.close()
        if isinstance(error, UsageError):
            raise
        raise PluginLoadError(f"{label} fails to start: {describe_cause(error)}") from error


def _create(plugin_class: type, found: ModelDirPlugin) -> Any:
    plugin = plugin_class()
    _warn_of_misspelt_methods(plugin_class, found.file)
    for name, keywords in METHOD_KEYWORDS.items():
        _check_method(getattr(plugin, name, None), name, keywords, found.file)
    if hasattr(plugin, "init_plugin"):
        folder = found.file.parent
        plugin.init_plugin(
            preprocess=True,
            postprocess=True,
            model_path=str(folder),
            config_file=found.config_file,
            enable_trt=False,
            model_type=_read_model_type(folder),
            vit_model_type=None,
        )
    return plugin


def _warn_of_misspelt_methods(plugin_class: type, file: Path) -> None:
    """All methods are optional, so one with a wrong name would just never be called."""
    absent = [name for name in METHOD_KEYWORDS if not hasattr(plugin_class, name)]
    for name in sorted(set(dir(plugin_class)) - set(METHOD_KEYWORDS)):
        if matches := difflib.get_close_matches(name, absent, n=1, cutoff=_TYPO_RATIO):
            logger.warning("%s: %s.%s is never called; did you mean %s?", file, CLASS_NAME, name, matches[0])


def _check_method(method: Any, name: str, keywords: tuple[str, ...], file: Path) -> None:
    if method is None:
        return
    if not callable(method) or inspect.iscoroutinefunction(method):
        raise PluginLoadError(
            f"{file}: {CLASS_NAME}.{name} must be a plain method; for async code mark a method "
            f"'async def ksana_{name}(self, ...)' with @hookimpl"
        )
    try:
        inspect.signature(method).bind(**dict.fromkeys(keywords))
    except TypeError as error:
        raise PluginLoadError(f"{file}: {CLASS_NAME}.{name} must accept **kwargs: {error}") from error


def _read_model_type(folder: Path) -> str:
    """``model_type`` of the folder's config.json, or an empty string; the model loader judges the file itself."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return ""
    return str(config.get("model_type", "")) if isinstance(config, dict) else ""
