"""Ksana: an LLM inference and serving framework made of a small core and plugins.

Importing this package is cheap: names load their module when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ksana.engine.async_engine import AsyncEngine
    from ksana.engine.llm import LLM
    from ksana.errors import KsanaError, RequestError, UsageError
    from ksana.markers import hookimpl, hookspec
    from ksana.types.output import RequestOutput
    from ksana.types.request import RequestDraft
    from ksana.types.sampling import SamplingParams

    __version__: str

_EXPORTS = {
    "AsyncEngine": "ksana.engine.async_engine",
    "KsanaError": "ksana.errors",
    "LLM": "ksana.engine.llm",
    "RequestDraft": "ksana.types.request",
    "RequestError": "ksana.errors",
    "RequestOutput": "ksana.types.output",
    "SamplingParams": "ksana.types.sampling",
    "UsageError": "ksana.errors",
    "hookimpl": "ksana.markers",
    "hookspec": "ksana.markers",
}

__all__ = [
    "LLM",
    "AsyncEngine",
    "KsanaError",
    "RequestDraft",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
    "UsageError",
    "__version__",
    "hookimpl",
    "hookspec",
]


def __getattr__(name: str) -> object:
    value: object
    if name == "__version__":
        value = _installed_version()
    elif name in _EXPORTS:
        value = getattr(importlib.import_module(_EXPORTS[name]), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _installed_version() -> str:
    from importlib import metadata  # loads the email package; only those who ask for the version pay for it

    try:
        return metadata.version("ksana")
    except metadata.PackageNotFoundError:  # a source tree that was never installed
        return "0+unknown"
