"""Hooks that may be async: order, errors, nothing left unawaited."""

from __future__ import annotations

import asyncio
import gc
import warnings
from types import SimpleNamespace
from typing import Any

import pytest

from ksana.markers import hookimpl
from ksana.plugin.manager import KsanaPluginManager
from ksana.plugin.maybe_await import await_all, call_in_order, maybe_await


class Appender:
    def __init__(self, mark: str) -> None:
        self.mark = mark

    @hookimpl
    def ksana_preprocess(self, draft: Any) -> None:
        draft.prompt += self.mark


class SlowAppender(Appender):
    @hookimpl
    async def ksana_preprocess(self, draft: Any) -> None:
        await asyncio.sleep(0)
        draft.prompt += self.mark


def test_maybe_await_takes_both() -> None:
    async def value() -> int:
        return 3

    async def main() -> None:
        assert await maybe_await(2) == 2
        assert await maybe_await(value()) == 3
        assert await await_all([1, value(), 5]) == [1, 3, 5]

    asyncio.run(main())


def test_an_error_leaves_no_coroutine_unawaited() -> None:
    async def fails() -> None:
        raise KeyError("first")

    async def later() -> None:
        raise AssertionError("must not run")

    gc.collect()  # what other tests have left is not asked for
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        with pytest.raises(KeyError, match="first"):
            asyncio.run(await_all([fails(), later()]))
        gc.collect()


def test_plugins_edit_in_order_although_some_are_async() -> None:
    """A plain hook call would run both ordinary functions before the coroutine in the middle."""
    manager = KsanaPluginManager()
    for number, plugin in enumerate([Appender("c"), SlowAppender("b"), Appender("a")]):
        manager.register(plugin, str(number))
    draft = SimpleNamespace(prompt="")
    asyncio.run(call_in_order(manager, "ksana_preprocess", draft=draft, context=None))
    assert draft.prompt == "abc"


def test_a_refusal_stops_the_plugins_after_it() -> None:
    class Refuser:
        @hookimpl
        async def ksana_preprocess(self) -> None:
            raise LookupError

    manager = KsanaPluginManager()
    manager.register(Appender("never"))
    manager.register(Refuser())
    draft = SimpleNamespace(prompt="")
    with pytest.raises(LookupError):
        asyncio.run(call_in_order(manager, "ksana_preprocess", draft=draft, context=None))
    assert draft.prompt == ""
