"""Importing a Python file that is on nobody's path."""

from __future__ import annotations

import importlib.util
import itertools
import sys
from pathlib import Path
from types import ModuleType

from ksana.errors import PluginLoadError
from ksana.plugin.messages import describe_cause

_load_numbers = itertools.count()


def import_file(file: Path) -> ModuleType:
    """Import under a name of its own, as a package whose path is the file's folder.

    Being a package lets ``from .vision import Encoder`` find ``vision.py`` beside it. The folder is not put on
    ``sys.path``: a ``json.py`` in it could then shadow the standard library's for the whole process.

    Raises:
        PluginLoadError: it is no Python module, or does not import.
    """
    name = f"_ksana_plugin_file_{next(_load_numbers)}"
    spec = importlib.util.spec_from_file_location(name, file, submodule_search_locations=[str(file.parent)])
    if spec is None or spec.loader is None:
        raise PluginLoadError(f"{file} cannot be read as a Python module")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # relative imports, dataclasses and pickle look there
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        for loaded in [key for key in sys.modules if key == name or key.startswith(name + ".")]:
            del sys.modules[loaded]
        raise PluginLoadError(f"{file} does not import: {describe_cause(error)}") from error
    return module
