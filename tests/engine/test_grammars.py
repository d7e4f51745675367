"""The cache of compiled grammars: waiting, sharing, limits."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest

from ksana.engine import grammars
from ksana.engine.grammars import GrammarCache
from ksana.errors import EngineDeadError, RequestError
from ksana.text.grammar import GrammarMatcher
from ksana.types.config import GrammarConfig
from ksana.types.grammar import GrammarSpec

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class EmptyGrammar:
    def matcher(self) -> GrammarMatcher:
        raise AssertionError("no text is written here")


class Compiler:
    """Compiles when it is allowed to; a specification "bad" is refused, "panic" is a defect."""

    def __init__(self) -> None:
        self.may_go_on = threading.Event()
        self.compiled: list[str] = []

    def compile(self, spec: GrammarSpec) -> EmptyGrammar:
        self.compiled.append(spec.value)
        assert self.may_go_on.wait(30)
        if spec.value == "bad":
            raise RequestError("bad", param="grammar")
        if spec.value == "panic":
            raise BaseException("panic")
        return EmptyGrammar()


@pytest.fixture
def compiler() -> Iterator[Compiler]:
    compiler = Compiler()
    yield compiler
    compiler.may_go_on.set()


def regex(value: str | int) -> GrammarSpec:
    return GrammarSpec("regex", str(value))


def cache_of(compiler: Compiler | None, **options: float) -> GrammarCache:
    return GrammarCache(lambda: compiler, GrammarConfig(**options))


async def until_compiling(compiler: Compiler, count: int) -> None:
    while len(compiler.compiled) < count:
        await asyncio.sleep(0.001)


async def test_one_compilation_serves_all_who_wait_and_those_who_come_later(compiler: Compiler) -> None:
    cache = cache_of(compiler)
    waiting = [asyncio.create_task(cache.get(regex("a"))) for _ in range(5)]
    await until_compiling(compiler, 1)
    waiting[0].cancel()
    compiler.may_go_on.set()
    results = await asyncio.gather(*waiting[1:])
    assert all(result is results[0] for result in results)
    assert await cache.get(regex("a")) is results[0]
    assert compiler.compiled == ["a"]


@pytest.mark.parametrize(("value", "code"), [("bad", None), ("panic", "invalid_grammar")])
async def test_failures_reach_their_own_requests_and_are_not_kept(
    compiler: Compiler, value: str, code: str | None
) -> None:
    compiler.may_go_on.set()
    cache = cache_of(compiler)
    for _ in range(3):  # more than there are threads: none has ended
        with pytest.raises(RequestError) as refusal:
            await cache.get(regex(value))
        assert (refusal.value.status, refusal.value.code, refusal.value.param) == (400, code, "grammar")
    assert compiler.compiled == [value] * 3
    await cache.get(regex("good"))


async def test_a_wait_has_an_end_and_stuck_threads_are_few(compiler: Compiler) -> None:
    cache = cache_of(compiler, grammar_timeout_s=0.05)
    before = threading.active_count()
    for number in range(4):
        with pytest.raises(RequestError) as refusal:
            await cache.get(regex(number))
        assert refusal.value.code == "grammar_timeout"
    assert threading.active_count() - before <= 2
    assert compiler.compiled == ["0", "1"]
    compiler.may_go_on.set()
    await asyncio.wait_for(_until_served(cache), 30)
    assert {"2", "3"}.isdisjoint(compiler.compiled)  # nobody waited for them any more


async def _until_served(cache: GrammarCache) -> None:
    while True:
        try:
            await cache.get(regex("late"))
            return
        except RequestError:
            await asyncio.sleep(0.01)


async def test_nothing_is_kept_for_those_who_have_left(compiler: Compiler) -> None:
    cache = cache_of(compiler)
    waiting = [asyncio.create_task(cache.get(regex(number))) for number in range(9)]
    await until_compiling(compiler, 2)
    for task in waiting[2:8]:
        task.cancel()
    await asyncio.wait(waiting[2:8])
    compiler.may_go_on.set()
    await waiting[8]
    assert compiler.compiled == ["0", "1", "8"]


async def test_the_grammars_that_are_kept_are_those_used_last(compiler: Compiler) -> None:
    compiler.may_go_on.set()
    cache = cache_of(compiler, max_cached_grammars=2)
    for value in ("a", "b", "a", "c", "a", "b"):
        await cache.get(regex(value))
    assert compiler.compiled == ["a", "b", "c", "b"]


async def test_large_specifications_take_the_place_of_many(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars, "_MAX_CACHED_CHARACTERS", 10)
    compiler.may_go_on.set()
    cache = cache_of(compiler)
    for value in ("aaaa", "bbbb", "cccc", "aaaa", "d" * 20, "d" * 20):
        await cache.get(regex(value))
    assert compiler.compiled == ["aaaa", "bbbb", "cccc", "aaaa", "d" * 20, "d" * 20]


async def test_closing_wakes_those_who_wait(compiler: Compiler) -> None:
    cache = cache_of(compiler)
    waiting = asyncio.create_task(cache.get(regex("a")))
    await until_compiling(compiler, 1)
    cache.close(EngineDeadError("the engine has stopped"))
    with pytest.raises(EngineDeadError):
        await waiting
    with pytest.raises(EngineDeadError):
        await cache.get(regex("b"))


async def test_without_a_compiler_structured_output_is_refused() -> None:
    with pytest.raises(RequestError, match="not available"):
        await cache_of(None).get(regex("a"))
