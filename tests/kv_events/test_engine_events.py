"""Whole engines, whose cache is followed from outside."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ksana import LLM, SamplingParams, UsageError, hookimpl
from ksana.builtins.kv_events import ksana_create_kv_event_publisher
from ksana.engine.kv_events import open_event_stream
from ksana.kv import KVCacheManager
from ksana.kv_events.block_hash import external_hash
from ksana.kv_events.log import EventLog
from ksana.kv_events.mirror import CacheMirror
from ksana.kv_events.transports.zmq_mirror import ZmqMirror
from ksana.kv_events.wire import decode_batch
from ksana.plugin.manager import KsanaPluginManager
from ksana.types.config import KVEventsConfig
from ksana.types.kv_events import AllBlocksCleared, BlockRemoved, BlockStored


@pytest.fixture(params=[False, True], ids=["serial", "overlapped"])
def enable_async(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture
def start(start_llm: Callable[..., LLM], tmp_path: Path) -> Iterator[Callable[..., tuple[LLM, ZmqMirror]]]:
    """Start an engine, with a mirror that follows it from the beginning."""
    endpoint = f"ipc://{tmp_path}/events"
    with ZmqMirror(endpoint, f"{endpoint}.replay", quiet_s=0.1) as mirror:

        def start_both(model: Path, **options: Any) -> tuple[LLM, ZmqMirror]:
            return start_llm(model, kv_events="zmq", kv_events_endpoint=endpoint, **options), mirror

        yield start_both


def kv_of(llm: LLM) -> KVCacheManager:
    return llm.engine._loop.core.scheduler.kv


def cached(llm: LLM) -> list[set[int]]:
    kv = kv_of(llm)
    return [set(map(external_hash, kv.cached_hashes(group_id))) for group_id in range(len(kv.config.groups))]


def mirrored(mirror: CacheMirror, num_groups: int) -> list[set[int]]:
    return [mirror.content.block_hashes(group_id) for group_id in range(num_groups)]


def catch_up(mirror: ZmqMirror, llm: LLM) -> None:
    """Poll until the mirror knows the last batch of the idle engine."""
    log: EventLog = llm.engine._loop.core._events._log
    while not (mirror.mirror.is_complete and mirror.mirror.last_id == log.last_id):
        mirror.poll(0.05)


def prompts(count: int) -> list[list[int]]:
    """Some long, some short, some beginning alike, by far more than the cache can hold."""
    draw = random.Random(0)
    shared = [draw.randrange(10, 200) for _ in range(40)]
    return [
        shared[: draw.randrange(40)] + [draw.randrange(10, 200) for _ in range(draw.randrange(1, 60))]
        for _ in range(count)
    ]


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_a_mirror_holds_what_the_cache_holds(start, tiny_path: Callable[..., Path], architecture: str) -> None:
    llm, mirror = start(tiny_path(architecture), num_blocks=40, block_size=8, max_model_len=128)
    sampling = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    num_groups = len(kv_of(llm).config.groups)
    assert num_groups == (2 if architecture == "gemma3" else 1)
    seen: set[type] = set()
    for _ in range(3):
        llm.generate(prompts(30), sampling)
        catch_up(mirror, llm)
        assert mirrored(mirror.mirror, num_groups) == cached(llm)
        assert all(cached(llm))
    log: EventLog = llm.engine._loop.core._events._log
    for batch in log.after(0):
        seen |= {type(event) for event in decode_batch(batch.event_id, batch.payload).events}
    assert seen == {AllBlocksCleared, BlockStored, BlockRemoved}, "nothing was evicted"


def test_each_block_is_told_with_its_tokens(start, tiny_path: Callable[..., Path]) -> None:
    llm, mirror = start(tiny_path(), block_size=4)
    prompt = list(range(20, 40))
    [output] = llm.generate([prompt], SamplingParams(max_tokens=9, temperature=0, ignore_eos=True))
    catch_up(mirror, llm)
    tokens = [*prompt, *output.token_ids]
    blocks = mirror.mirror.content.groups[0].blocks
    parent = None
    for start_of_block in range(0, len(tokens) - 4, 4):
        [(block_hash, block)] = [(h, b) for h, b in blocks.items() if b.parent_block_hash == parent]
        assert block.token_ids.tolist() == tokens[start_of_block : start_of_block + 4]
        parent = block_hash


def test_an_engine_that_ends_frees_its_address(start, tiny_path: Callable[..., Path], tmp_path: Path) -> None:
    for _ in range(2):
        llm, mirror = start(tiny_path())
        llm.generate([[1] * 40], SamplingParams(max_tokens=1))
        catch_up(mirror, llm)
        assert mirror.mirror.content.num_blocks == 2
        llm.close()


def test_an_engine_that_cannot_start_frees_its_address(start, tiny_path: Callable[..., Path]) -> None:
    with pytest.raises(UsageError, match="max-model-len"):
        start(tiny_path(), max_model_len=10**6)
    start(tiny_path())


def test_a_publisher_that_nobody_has_is_refused(start_llm: Callable[..., LLM], tiny_path: Callable[..., Path]) -> None:
    for name in ("pigeon", ""):
        with pytest.raises(UsageError, match=f"the publisher of --kv-events '{name}'; built in are zmq and nats"):
            start_llm(tiny_path(), kv_events=name)


@pytest.mark.parametrize("publisher", ["zmq", "nats"])
@pytest.mark.parametrize("option", ["endpoint", "replay_endpoint", "topic"])
def test_bytes_that_are_no_text_are_refused(publisher: str, option: str) -> None:
    config = KVEventsConfig(publisher=publisher, **{option: "ipc://\udcff"})
    with pytest.raises(UsageError, match=f"^--kv-events-{option.replace('_', '-')} is not valid UTF-8$"):
        ksana_create_kv_event_publisher(config, EventLog(10))


@pytest.mark.parametrize(("publisher", "module"), [("zmq", "zmq"), ("nats", "nats")])
def test_a_missing_library_is_named(
    start_llm: Callable[..., LLM],
    tiny_path: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    publisher: str,
    module: str,
) -> None:
    for name in list(sys.modules):
        if name.split(".")[0] == module or name.startswith("ksana.kv_events.transports."):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UsageError, match=rf"no module {module}.*pip install '\.\[events\]'"):
        start_llm(tiny_path(), kv_events=publisher)


def test_a_plugin_brings_a_publisher() -> None:
    class Publisher:
        def __init__(self, log: EventLog) -> None:
            self.log = log

        def notify(self) -> None:
            pass

        def close(self) -> None:
            pass

    class Plugin:
        @hookimpl
        def ksana_create_kv_event_publisher(self, config: KVEventsConfig, log: EventLog) -> Publisher | None:
            return Publisher(log) if config.publisher == "mine" else None

    plugins = KsanaPluginManager()
    plugins.register(Plugin())
    stream = open_event_stream(KVEventsConfig(publisher="mine"), plugins)
    assert stream is not None
    assert stream.publisher.log is stream.log
    assert open_event_stream(KVEventsConfig(), plugins) is None
