"""The engine under servers' habits: aborts at any moment, failing steps, plugins, stops."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from ksana import AsyncEngine, RequestDraft, RequestError, SamplingParams, hookimpl
from ksana.errors import EngineDeadError, UsageError
from ksana.plugin.spec import PluginSpecs, create_plugin_manager
from ksana.types.config import CacheConfig, KernelConfig, KsanaConfig, ModelOptions, SchedulerConfig
from ksana.types.output import FinishReason, RequestStats
from ksana.types.step import ModelRunnerOutput, SchedulerOutput

ONE = SamplingParams(max_tokens=1)

Scenario = Callable[[AsyncEngine], Awaitable[None]]


@pytest.fixture
def run(tiny_path: Callable[..., Path], enable_async: bool) -> Callable[..., None]:
    """Run a coroutine against a fresh engine; at the end nothing may be running and no block may be missing."""

    def run(scenario: Scenario, *plugins: Any, leaves_clean: bool = True, **scheduler: Any) -> None:
        manager = create_plugin_manager(PluginSpecs(autoload=False))
        for plugin in plugins:
            manager.register(plugin)
        config = KsanaConfig(
            model=ModelOptions(model=str(tiny_path())),
            scheduler=SchedulerConfig(**{"max_num_seqs": 4, "enable_async": enable_async, **scheduler}),
            cache=CacheConfig(num_blocks=100, check_integrity=True),
            kernel=KernelConfig(threads=1),
        )

        async def main() -> None:
            engine = await asyncio.to_thread(AsyncEngine.start, config, manager)
            free = engine.num_free_blocks
            try:
                await scenario(engine)
                if leaves_clean:
                    assert await engine.drain(10.0)
                    assert engine.num_free_blocks == free
                    assert len(engine._loop.core._outputs) == 0
            finally:
                await engine.stop("the test is over")

        asyncio.run(main())

    return run


def draft(length: int = 5, tokens: int = 20, **more: Any) -> RequestDraft:
    sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    return RequestDraft(prompt_token_ids=[7 + i % 90 for i in range(length)], sampling=sampling, **more)


async def complete(engine: AsyncEngine, request: RequestDraft) -> Any:
    async with await engine.submit(request) as stream:
        return await stream.result()


def test_random_aborts_against_short_requests(run: Callable[..., None]) -> None:
    """sglang#28341: an abort that raced the end of its request raised KeyError and ended the server."""

    async def scenario(engine: AsyncEngine) -> None:
        rng = random.Random(0)

        async def one() -> None:
            stream = await engine.submit(draft(rng.randrange(1, 40), rng.randrange(1, 6)))
            await asyncio.sleep(rng.random() * 0.02)
            for _ in range(rng.randrange(1, 4)):
                stream.abort()
            output = await stream.result()
            assert output.finish_reason in (FinishReason.ABORT, FinishReason.LENGTH)

        for _ in range(10):
            await asyncio.gather(*(one() for _ in range(50)))
        assert (await complete(engine, draft())).finish_reason is FinishReason.LENGTH

    run(scenario, split_fuse_token_num=8)


def test_leaving_in_every_phase_aborts(run: Callable[..., None]) -> None:
    """vllm#10806, sglang#36876: queued, in the middle of the prompt, decoding; also by cancellation of the consumer."""

    async def scenario(engine: AsyncEngine) -> None:
        running = [await engine.submit(draft(300, 100)) for _ in range(6)]
        consumer = asyncio.create_task(complete(engine, draft(30, 400)))
        await asyncio.sleep(0.05)
        consumer.cancel()
        with pytest.raises(asyncio.CancelledError):
            await consumer
        for number, stream in enumerate(running):
            async with stream:
                if number % 2:
                    await stream.__anext__()
        assert await engine.drain(5.0)

    run(scenario, split_fuse_token_num=8)


def test_leaving_before_the_engine_has_taken_the_request(run: Callable[..., None]) -> None:
    async def scenario(engine: AsyncEngine) -> None:
        resume = threading.Event()
        engine._loop.post(lambda core: resume.wait(10.0) and None)
        consumer = asyncio.create_task(engine.submit(draft(5, 400)))
        while engine.num_unfinished() == 0:
            await asyncio.sleep(0)
        consumer.cancel()
        with pytest.raises(asyncio.CancelledError):
            await consumer
        resume.set()
        while engine.num_unfinished():
            await asyncio.sleep(0.001)
        assert counter.reasons == [FinishReason.ABORT]

    counter = _Reasons()
    run(scenario, counter)


def test_a_consumer_whose_event_loop_is_closed_does_not_hold_the_engine_up(run: Callable[..., None]) -> None:
    async def scenario(engine: AsyncEngine) -> None:
        await asyncio.to_thread(lambda: asyncio.run(engine.submit(draft(5, 500))))
        assert (await complete(engine, draft())).finish_reason is FinishReason.LENGTH
        await engine.drain(10.0)
        assert sorted(counter.reasons) == [FinishReason.ABORT, FinishReason.LENGTH]

    counter = _Reasons()
    run(scenario, counter)


class _Reasons:
    """Collects why requests ended."""

    def __init__(self) -> None:
        self.reasons: list[FinishReason] = []

    @hookimpl
    def ksana_request_finished(self, finish_reason: FinishReason) -> None:
        self.reasons.append(finish_reason)


def test_a_failing_step_ends_only_what_was_running(run: Callable[..., None], caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(engine: AsyncEngine) -> None:
        executor = _Failing(engine)
        running = await engine.submit(draft(4, 400))
        await running.__anext__()
        executor.fail_next = True
        failed = await running.result()
        assert failed.finish_reason is FinishReason.ERROR
        assert failed.error is not None and failed.error.status == 500
        assert "boom" not in failed.error.message
        again = await complete(engine, draft(4, 6))
        assert again.finish_reason is FinishReason.LENGTH
        assert executor.num_resets == 1  # nobody knows what the rows of a failed step hold
        assert again.token_ids == failed.token_ids[:6] or len(failed.token_ids) < 6
        assert engine.is_alive

    run(scenario)
    assert "boom" in caplog.text


class _Failing:
    """Stands between core and runner, as an executor of several ranks would, and loses a step when told to."""

    def __init__(self, engine: AsyncEngine) -> None:
        pipeline = engine._loop.core._pipeline
        self._inner = pipeline._executor
        self.fail_next = False
        self.num_resets = 0
        pipeline._executor = self

    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        if self.fail_next:
            self.fail_next = False
            raise RuntimeError("boom")
        return self._inner.execute(step)

    def reset(self) -> None:
        self.num_resets += 1
        self._inner.reset()


def test_a_full_queue_refuses_with_429_and_serves_on(run: Callable[..., None]) -> None:
    async def scenario(engine: AsyncEngine) -> None:
        results = await asyncio.gather(*(complete(engine, draft(10, 30)) for _ in range(12)), return_exceptions=True)
        refused = [result for result in results if isinstance(result, RequestError)]
        assert refused and all((error.status, error.code) == (429, "queue_full") for error in refused)
        assert len(results) - len(refused) >= 2
        assert (await complete(engine, draft())).finish_reason is FinishReason.LENGTH

    run(scenario, max_num_seqs=1, max_waiting_queue_len=2)


def test_a_flood_is_refused_before_it_is_tokenised(run: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(engine: AsyncEngine) -> None:
        admitted: list[RequestDraft] = []
        admit = engine._admission.admit

        def counting(request: RequestDraft) -> Any:
            admitted.append(request)
            return admit(request)

        monkeypatch.setattr(engine._admission, "admit", counting)
        resume = threading.Event()
        engine._loop.post(lambda core: resume.wait(10.0) and None)
        consumers = [asyncio.create_task(complete(engine, draft(5, 3))) for _ in range(500)]
        while sum(consumer.done() for consumer in consumers) < 497:
            await asyncio.sleep(0)
        resume.set()
        results = await asyncio.gather(*consumers, return_exceptions=True)
        refused = [result for result in results if isinstance(result, RequestError)]
        assert {(error.status, error.code) for error in refused} == {(429, "queue_full")}
        assert len(admitted) == 3

    run(scenario, max_num_seqs=1, max_waiting_queue_len=2)


def test_waiting_too_long_ends_with_503(run: Callable[..., None]) -> None:
    async def scenario(engine: AsyncEngine) -> None:
        async with await engine.submit(draft(5, 500)):
            stream = await engine.submit(draft())
            engine._loop.post(lambda core: time.sleep(0.06))  # however fast the first one's tokens come
            waited = await stream.result()
        assert waited.error is not None and (waited.error.status, waited.error.code) == (503, "timeout")

    run(scenario, max_num_seqs=1, waiting_timeout_s=0.05)


def test_lower_priority_values_run_first(run: Callable[..., None]) -> None:
    async def scenario(engine: AsyncEngine) -> None:
        finished: list[str] = []

        async def one(name: str, priority: int) -> None:
            await complete(engine, draft(5, 30, priority=priority))
            finished.append(name)

        first = asyncio.create_task(one("first", 5))
        await asyncio.sleep(0.01)
        await asyncio.gather(first, one("late and urgent", 0), one("late", 7), one("middle", 3))
        assert finished.index("late and urgent") < finished.index("middle") < finished.index("late")

    run(scenario, max_num_seqs=1, policy="priority")


def test_preprocess_hooks_see_and_edit_the_draft_in_order(run: Callable[..., None]) -> None:
    class Early:
        @hookimpl
        async def ksana_preprocess(self, draft: RequestDraft) -> None:
            await asyncio.sleep(0)
            draft.prompt_token_ids = [*(draft.prompt_token_ids or []), 11]

    class Late:
        @hookimpl
        def ksana_preprocess(self, draft: RequestDraft) -> None:
            draft.prompt_token_ids = [*(draft.prompt_token_ids or []), 12]

    async def scenario(engine: AsyncEngine) -> None:
        assert (await complete(engine, draft(2, 1))).prompt_token_ids == [7, 8, 12, 11]

    run(scenario, Early(), Late())


def test_a_refusing_plugin_and_a_broken_one(run: Callable[..., None], caplog: pytest.LogCaptureFixture) -> None:
    class Plugin:
        @hookimpl
        def ksana_preprocess(self, draft: RequestDraft) -> None:
            if draft.additional_params.get("refuse"):
                raise RequestError("not today", status=403, code="closed")

        @hookimpl
        def ksana_postprocess(self, output: Any, draft: RequestDraft) -> None:
            if draft.additional_params.get("break"):
                raise KeyError("secret detail")
            output.extra["length"] = len(output.token_ids)

    async def scenario(engine: AsyncEngine) -> None:
        with pytest.raises(RequestError, match="not today") as caught:
            await engine.submit(draft(additional_params={"refuse": True}))
        assert caught.value.status == 403
        broken = await complete(engine, draft(additional_params={"break": True}))
        assert broken.error is not None and broken.error.code == "plugin_error"
        assert "secret" not in broken.error.message
        assert (await complete(engine, draft(3, 4))).extra == {"length": 4}

    run(scenario, Plugin())
    assert "secret detail" in caplog.text


def test_request_finished_is_called_once_for_every_request(run: Callable[..., None]) -> None:
    class Counter:
        def __init__(self) -> None:
            self.ended: dict[str, tuple[FinishReason, RequestStats]] = {}

        @hookimpl
        def ksana_request_finished(self, request_id: str, finish_reason: FinishReason, stats: RequestStats) -> None:
            assert request_id not in self.ended
            self.ended[request_id] = (finish_reason, stats)
            if finish_reason is FinishReason.ABORT:
                raise RuntimeError("a broken exporter")

    counter = Counter()

    async def scenario(engine: AsyncEngine) -> None:
        done = await complete(engine, draft(20, 4, external_id="same"))
        stream = await engine.submit(draft(20, 400, external_id="same"))
        stream.abort()
        assert (await stream.result()).finish_reason is FinishReason.ABORT
        reason, stats = counter.ended[done.request_id]
        assert (reason, stats.num_prompt_tokens, stats.num_output_tokens) == (FinishReason.LENGTH, 20, 4)
        times = (stats.arrival_time, stats.first_scheduled_time, stats.first_token_time, stats.finished_time)
        assert None not in times and list(times) == sorted(times)

    run(scenario, counter)
    assert len(counter.ended) == 2


def test_a_slow_consumer_gets_merged_outputs(run: Callable[..., None]) -> None:
    async def scenario(engine: AsyncEngine) -> None:
        expected = await complete(engine, draft(5, 60))
        async with await engine.submit(draft(5, 60)) as stream:
            await engine.drain(10.0)
            outputs = [output async for output in stream]
        assert len(outputs) == 1
        assert outputs[0].token_ids == expected.token_ids and outputs[0].text_delta == expected.text

    run(scenario)


def test_a_consumer_of_the_end_alone_is_woken_once(run: Callable[..., None]) -> None:
    async def scenario(engine: AsyncEngine) -> None:
        expected = await complete(engine, draft(5, 30))
        async with await engine.submit(draft(5, 30, final_only=True)) as stream:
            outputs = [output async for output in stream]
        assert len(outputs) == 1 and outputs[0].finish_reason is FinishReason.LENGTH
        assert (outputs[0].text, outputs[0].token_ids) == (expected.text, expected.token_ids)

    run(scenario)


def test_abort_all_tells_every_consumer(run: Callable[..., None]) -> None:
    async def scenario(engine: AsyncEngine) -> None:
        consumers = [asyncio.create_task(complete(engine, draft(5, 500))) for _ in range(8)]
        while len(engine._streams) < 8:
            await asyncio.sleep(0.001)
        await engine.abort_all()
        outputs = await asyncio.wait_for(asyncio.gather(*consumers), 5)
        assert {output.finish_reason for output in outputs} == {FinishReason.ABORT}

    run(scenario)


def test_a_stopped_engine_ends_its_streams(run: Callable[..., None]) -> None:
    async def scenario(engine: AsyncEngine) -> None:
        stream = await engine.submit(draft(5, 500))
        await engine.stop("maintenance")
        with pytest.raises(EngineDeadError, match="maintenance"):
            await stream.result()
        with pytest.raises(EngineDeadError):
            await engine.submit(draft())
        assert not engine.is_alive

    run(scenario, leaves_clean=False)


class _Gate:
    """Holds requests up in ``ksana_preprocess``."""

    def __init__(self) -> None:
        self.reached = asyncio.Event()
        self.open = asyncio.Event()

    @hookimpl
    async def ksana_preprocess(self) -> None:
        self.reached.set()
        await self.open.wait()


def test_an_engine_that_stops_during_preprocessing_refuses_the_request(run: Callable[..., None]) -> None:
    async def scenario(engine: AsyncEngine) -> None:
        consumer = asyncio.create_task(engine.submit(draft()))
        await gate.reached.wait()
        await engine.stop("maintenance")
        gate.open.set()
        with pytest.raises(EngineDeadError, match="maintenance"):
            await asyncio.wait_for(consumer, 10.0)
        assert engine.num_unfinished() == 0

    gate = _Gate()
    run(scenario, gate, leaves_clean=False)


def test_draining_waits_for_requests_that_are_still_preprocessed(run: Callable[..., None]) -> None:
    async def scenario(engine: AsyncEngine) -> None:
        consumer = asyncio.create_task(complete(engine, draft()))
        await gate.reached.wait()
        assert engine.num_unfinished() == 1
        assert not await engine.drain(0.0)
        gate.open.set()
        assert await engine.drain(10.0)
        assert (await consumer).finish_reason is FinishReason.LENGTH

    gate = _Gate()
    run(scenario, gate)


def test_a_plugin_that_fails_at_the_start_leaves_no_engine_behind(tiny_path: Callable[..., Path]) -> None:
    class Plugin:
        stopped_because = ""

        @hookimpl
        def ksana_engine_started(self, engine: AsyncEngine) -> None:
            self.engine = engine
            raise UsageError("no exporter")

        @hookimpl
        def ksana_engine_stopping(self, reason: str) -> None:
            self.stopped_because = reason

    plugin = Plugin()
    manager = create_plugin_manager(PluginSpecs(autoload=False))
    manager.register(plugin)
    config = KsanaConfig(model=ModelOptions(model=str(tiny_path())), cache=CacheConfig(num_blocks=100))
    with pytest.raises(UsageError, match="no exporter"):
        AsyncEngine.start(config, manager)
    assert not plugin.engine.is_alive and not plugin.engine._loop._thread.is_alive()
    assert plugin.stopped_because == "a plugin could not start"


def test_a_dead_loop_is_seen_by_everybody(run: Callable[..., None]) -> None:
    """A bug in the step loop itself must not leave clients waiting."""

    async def scenario(engine: AsyncEngine) -> None:
        stream = await engine.submit(draft(5, 500))
        engine._loop.post(lambda core: 1 // 0)  # type: ignore[arg-type, return-value]
        with pytest.raises(EngineDeadError, match="ZeroDivisionError"):
            await stream.result()
        assert not engine.is_alive
        with pytest.raises(EngineDeadError):
            await engine.submit(draft())

    run(scenario, leaves_clean=False)


def test_blocks_are_verified_when_the_engine_falls_idle(run: Callable[..., None]) -> None:
    """Every other test relies on this check."""

    async def scenario(engine: AsyncEngine) -> None:
        engine._loop.post(lambda core: setattr(core.scheduler.kv._cache.pool.blocks[50], "ref_cnt", 1))
        with pytest.raises(EngineDeadError, match="AssertionError"):
            await complete(engine, draft())

    run(scenario, leaves_clean=False)


def test_consumers_on_two_event_loops(run: Callable[..., None]) -> None:
    async def scenario(engine: AsyncEngine) -> None:
        here, there = await asyncio.gather(
            complete(engine, draft(5, 12)), asyncio.to_thread(lambda: asyncio.run(complete(engine, draft(5, 12))))
        )
        assert here.token_ids == there.token_ids

    run(scenario)


def test_absurd_top_k_harms_nobody(run: Callable[..., None]) -> None:
    """A number beyond 64 bits failed the step, and with it everybody else's request."""

    async def scenario(engine: AsyncEngine) -> None:
        absurd = RequestDraft(
            prompt_token_ids=[7, 8], sampling=SamplingParams(top_k=2**80, max_tokens=3, ignore_eos=True)
        )
        outputs = await asyncio.gather(complete(engine, draft()), complete(engine, absurd))
        assert [output.finish_reason for output in outputs] == [FinishReason.LENGTH, FinishReason.LENGTH]

    run(scenario)


def test_a_hopelessly_long_text_is_refused_by_its_beginning(run: Callable[..., None]) -> None:
    """Seven million characters took seventeen seconds and a GiB to tokenise before they were refused."""

    async def scenario(engine: AsyncEngine) -> None:
        for request in (
            RequestDraft(prompt="over and over " * 100_000),
            RequestDraft(messages=[{"role": "user", "content": "over and over " * 100_000}]),
        ):
            with pytest.raises(RequestError, match="has more than") as caught:
                await engine.submit(request)
            assert caught.value.code == "context_length_exceeded"
        with pytest.raises(RequestError, match=r"has \d+ and at least"):
            await engine.submit(RequestDraft(prompt="over and over " * 300))

    run(scenario)


def test_a_turn_of_the_event_loop_tokenises_only_so_much(run: Callable[..., None]) -> None:
    """A thousand prompts that come at once are as bad for the loop as a long one."""

    async def scenario(engine: AsyncEngine) -> None:
        assert not engine._take_inline(5000)
        assert [engine._take_inline(1500) for _ in range(4)] == [True, True, False, False]
        await asyncio.sleep(0)
        assert engine._take_inline(1500)
        await asyncio.gather(*(complete(engine, RequestDraft(prompt="a b " * 50, sampling=ONE)) for _ in range(60)))

    run(scenario)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_plugin_that_exits_on_the_engines_thread_leaves_nobody_waiting(run: Callable[..., None]) -> None:
    class Exits:
        @hookimpl
        def ksana_request_finished(self) -> None:
            raise SystemExit(1)

    async def scenario(engine: AsyncEngine) -> None:
        with pytest.raises(EngineDeadError, match="SystemExit"):
            await asyncio.wait_for(complete(engine, draft()), 20.0)
        assert not engine.is_alive

    run(scenario, Exits(), leaves_clean=False)


def test_a_tokenizer_that_fails_ends_its_own_request_only(
    run: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    """A plugin's tokenizer may raise while decoding: a token of one request, or its start."""

    class Fragile:
        def __init__(self, inner: Any) -> None:
            self._inner = inner

        def __getattr__(self, name: str) -> Any:
            return getattr(self._inner, name)

        def token_bytes(self, token_id: int) -> bytes | None:
            if self.broken:
                raise LookupError("no such piece")
            return self._inner.token_bytes(token_id)

        broken = False

    class Plugin:
        @hookimpl(wrapper=True)
        def ksana_create_tokenizer(self) -> Any:
            self.tokenizer = Fragile((yield))
            return self.tokenizer

    plugin = Plugin()

    async def scenario(engine: AsyncEngine) -> None:
        running = await engine.submit(draft(5, 400))
        await running.__anext__()
        plugin.tokenizer.broken = True
        failed = await running.result()
        assert failed.error is not None and failed.error.code == "detokenization_failed"
        with pytest.raises(RequestError) as caught:
            await engine.submit(draft(5, 3))
        assert caught.value.status == 500
        plugin.tokenizer.broken = False
        assert (await complete(engine, draft(5, 3))).finish_reason is FinishReason.LENGTH

    run(scenario, plugin)
    assert "no such piece" in caplog.text
