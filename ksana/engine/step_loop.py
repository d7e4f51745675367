"""The thread that owns the engine core."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass

from ksana.engine.assembly import EngineParts
from ksana.engine.context import ProcessingContext
from ksana.engine.core import EngineCore
from ksana.engine.output_processor import OutputDelta
from ksana.errors import EngineDeadError

logger = logging.getLogger(__name__)

_JOIN_TIMEOUT_S = 60.0

_POLL_INTERVAL_S = 0.002
"""Between two looks at transfers, while there is nothing to compute."""

_BURST_GAP_S = 0.001
_BURST_S = 0.005
"""Where several commands come at once after a rest, more are probably on their way: a step begins when none has come
for the first time, or after the second. Whose prompt is in a step that leaves others out waits for theirs, too."""


class StepLoop:
    """Builds the core on a thread of its own, then steps it there, and sleeps when there is nothing to do.

    Loading and computing share a thread for a reason (this one, or the core's compute thread): OpenMP keeps a team of
    workers for every thread that computes, and as soon as there are more workers than processors, all of them sleep
    between operators instead of spinning. A second team, idle as it is, costs a quarter of the decode rate on two
    cores.

    Args:
        build: makes the engine's parts; called once, on the thread.
    """

    def __init__(self, build: Callable[[], EngineParts]) -> None:
        self._build = build
        self._parts: Future[EngineParts] = Future()
        self._consumer: Future[_Consumer] = Future()
        self._inbox: queue.SimpleQueue[Callable[[EngineCore], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="ksana-engine", daemon=True)

    def start(self) -> ProcessingContext:
        """Build the core; blocks until that is done. Raises what ``build`` raises."""
        self._thread.start()
        return self._parts.result().context

    def serve(self, deliver: Callable[[Iterable[OutputDelta]], None], die: Callable[[EngineDeadError], None]) -> None:
        """Begin to step.

        Args:
            deliver: gets the news of each step, on the thread.
            die: called once if the loop ends because of an error of its own.
        """
        self._consumer.set_result(_Consumer(deliver, die))

    @property
    def core(self) -> EngineCore:
        """The core, to look at; only the thread may change it."""
        return self._parts.result().core

    def post(self, command: Callable[[EngineCore], None]) -> None:
        """Run ``command`` on the thread, before the next step."""
        self._inbox.put(command)

    def stop(self) -> None:
        """End the thread after its present step. Safe to call from any other thread."""
        self._inbox.put(None)
        self._thread.join(_JOIN_TIMEOUT_S)

    def _run(self) -> None:
        try:
            self._parts.set_result(self._build())
        except BaseException as error:
            self._parts.set_exception(error)
            return
        consumer = self._consumer.result()
        core = self.core
        try:
            while self._work_off_inbox(core):
                if core.has_work():
                    consumer.deliver(core.step())
        except BaseException as error:
            # A plugin's SystemExit too: a thread that ends silently leaves everybody waiting.
            logger.critical("the engine loop has died", exc_info=True)
            consumer.die(EngineDeadError(f"the engine loop has died: {type(error).__name__}"))
        finally:
            core.close()

    def _work_off_inbox(self, core: EngineCore) -> bool:
        """Returns False when told to stop. Blocks only if there is nothing else to do, for ever or for a moment."""
        idle = not core.has_work()
        block, timeout = idle, None
        if not idle and core.only_transfers:
            block, timeout = True, _POLL_INTERVAL_S
        num_commands, burst_end = 0, 0.0
        while True:
            try:
                command = self._inbox.get(block, timeout)
            except queue.Empty:
                return True
            if command is None:
                return False
            command(core)
            num_commands += 1
            if idle and num_commands == 2:
                burst_end = time.monotonic() + _BURST_S
            block, timeout = time.monotonic() < burst_end, _BURST_GAP_S


@dataclass(frozen=True, slots=True)
class _Consumer:
    """Who wants to hear of steps."""

    deliver: Callable[[Iterable[OutputDelta]], None]
    die: Callable[[EngineDeadError], None]
