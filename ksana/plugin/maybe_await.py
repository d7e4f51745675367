"""Hooks that may be ``async def``: pluggy calls but does not await, these helpers do."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pluggy


async def maybe_await(value: Any) -> Any:
    """Return ``value``, awaited if it is awaitable."""
    return await value if inspect.isawaitable(value) else value


async def await_all(results: Iterable[Any]) -> list[Any]:
    """Await the results of one hook call one after another, in order.

    If one raises, the coroutines after it are closed, so that nothing is left unawaited, and the error goes on.
    """
    remaining = list(results)
    finished: list[Any] = []
    try:
        while remaining:
            finished.append(await maybe_await(remaining.pop(0)))
    finally:
        for value in remaining:
            if inspect.iscoroutine(value):
                value.close()
    return finished


async def call_in_order(manager: pluggy.PluginManager, hook_name: str, **kwargs: Any) -> list[Any]:
    """Call a hook plugin by plugin, awaiting each before the next one is called.

    A plain hook call runs every ordinary function first and leaves the coroutines for later. Where plugins edit one
    object in turn, that would break the promised order (last registered first), so each is called by itself here.
    A wrapper therefore wraps the implementation of its own plugin only.
    """
    results: list[Any] = []
    for caller in _callers_of_each(manager, hook_name):
        results += await await_all(caller(**kwargs))
    return results


async def call_first(manager: pluggy.PluginManager, hook_name: str, **kwargs: Any) -> Any:
    """Ask plugin by plugin until one has an answer other than None, and return that, or None if nobody has.

    A plain call of a firstresult hook would take the coroutine of an implementation for its answer.
    """
    for caller in _callers_of_each(manager, hook_name):
        answer = await maybe_await(caller(**kwargs))
        if answer is not None:
            return answer
    return None


def _callers_of_each(manager: pluggy.PluginManager, hook_name: str) -> Iterator[pluggy.HookCaller]:
    """The hook as each plugin by itself implements it, in the order of calls."""
    caller: pluggy.HookCaller = getattr(manager.hook, hook_name)
    plugins = [impl.plugin for impl in reversed(caller.get_hookimpls())]
    for plugin in dict.fromkeys(plugins):
        yield manager.subset_hook_caller(hook_name, [other for other in plugins if other is not plugin])
