"""Tracing of hook calls for plugin authors: ``KSANA_TRACE_PLUGINS=1``."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pluggy

logger = logging.getLogger("ksana.plugin.trace")


def trace_hook_calls(manager: pluggy.PluginManager) -> None:
    """Log every hook call of ``manager``: hook, plugins, time and type of the result, never a value.

    Requests and configuration carry prompts and secrets; that is why neither arguments nor results are shown.
    """
    starts = threading.local()

    def before(hook_name: str, hook_impls: Sequence[pluggy.HookImpl], kwargs: Mapping[str, object]) -> None:
        if not hasattr(starts, "stack"):
            starts.stack = []
        starts.stack.append(time.perf_counter())

    def after(
        outcome: pluggy.Result[object],
        hook_name: str,
        hook_impls: Sequence[pluggy.HookImpl],
        kwargs: Mapping[str, object],
    ) -> None:
        milliseconds = (time.perf_counter() - starts.stack.pop()) * 1000
        names = ", ".join(impl.plugin_name for impl in reversed(hook_impls)) or "nobody"
        logger.info("%s: called %s, %.3f ms, %s", hook_name, names, milliseconds, _describe(outcome))

    manager.add_hookcall_monitoring(before, after)


def _describe(outcome: pluggy.Result[object]) -> str:
    if outcome.exception is not None:
        return f"raised {type(outcome.exception).__name__}"
    result = outcome.get_result()
    if isinstance(result, list):
        return f"returned [{', '.join(type(item).__name__ for item in result)}]"
    return f"returned {type(result).__name__}"
