"""What the engine tells about its steps and requests: nothing, or a trace.

A step makes a handful of events and a request a dozen, whatever their number of tokens. Prompts and answers never
appear.
"""

from __future__ import annotations

import os
import time

from ksana.scheduling import RequestUpdate, Scheduler
from ksana.tracing import TraceEvent, TraceWriter
from ksana.types.output import FinishReason
from ksana.types.request import Request
from ksana.types.step import SchedulerOutput

_SCHEDULING, _COMPUTING = 1, 2
_THREADS = {_SCHEDULING: "scheduling", _COMPUTING: "computing"}


class NoTrace:
    """Hears of everything and forgets it."""

    def now(self) -> int:
        """The time for the ``started`` of other methods, in nanoseconds."""
        return 0

    def request_added(self, request: Request) -> None:
        """A request waits."""

    def step_scheduled(self, started: int, step: SchedulerOutput, scheduler: Scheduler) -> None:
        """A step is about to be computed."""

    def step_executed(self, started: int, step: SchedulerOutput) -> None:
        """A step has been computed. The only method that is called on the computing thread."""

    def step_processed(self, started: int, step: SchedulerOutput, updates: list[RequestUpdate]) -> None:
        """The output of a step has been taken in. What has ended has been reported before."""

    def request_finished(self, request: Request, reason: FinishReason | None) -> None:
        """A request has ended."""

    def close(self) -> None:
        """The engine has stopped."""


class EngineTrace(NoTrace):
    """Writes a trace.

    On the tracks of two threads: ``schedule``, ``execute`` and ``process`` of each step, with its number and size. For
    each request a track with what it went through: ``queued``, ``prefill``, ``decode``, ``preempted``, then prefill
    again. Counters: requests that run and wait, blocks in use.

    Raises:
        UsageError: the file cannot be written.
    """

    def __init__(self, path: str) -> None:
        self._pid = os.getpid()
        about = {"name": "ksana", "started": time.strftime("%Y-%m-%dT%H:%M:%S%z")}
        name = {"ph": "M", "name": "process_name", "pid": self._pid, "tid": 0, "args": about}
        self._start = time.perf_counter_ns()
        self._writer = TraceWriter(path, name)
        self._emit = self._writer.emit
        self._phases: dict[str, str] = {}
        self._prefilling: set[str] = set()
        self._counters: dict[str, dict[str, int]] = {}
        for tid, thread in _THREADS.items():
            self._emit({"ph": "M", "name": "thread_name", "pid": self._pid, "tid": tid, "args": {"name": thread}})

    def now(self) -> int:
        return time.perf_counter_ns()

    def request_added(self, request: Request) -> None:
        now = self._microseconds(self.now())
        request_id = request.request_id
        self._emit(_span("b", request_id, request_id, now, {"prompt_tokens": request.num_prompt_tokens}))
        self._phases[request_id] = "queued"
        self._emit(_span("b", request_id, "queued", now))

    def step_scheduled(self, started: int, step: SchedulerOutput, scheduler: Scheduler) -> None:
        ended = self.now()
        now = self._microseconds(ended)
        for request_id in step.removed_request_ids:
            if request_id in scheduler.requests:  # not ended, so preempted
                self._enter(request_id, "preempted", now)
        for new in step.new_requests:
            self._enter(new.request_id, "prefill", now)
        counts = step.num_scheduled_tokens
        num_tokens, num_prefill = sum(counts.values()), self._num_prefill_tokens(step, scheduler)
        blocks = scheduler.kv.num_usable_blocks - scheduler.kv.num_free_blocks
        size = {
            "step": step.number,
            "requests": len(counts),
            "tokens": num_tokens,
            "prefill_tokens": num_prefill,
            "decode_tokens": num_tokens - num_prefill,
            "blocks": blocks,
            "waiting": scheduler.num_waiting,
        }
        self._emit(self._slice("schedule", _SCHEDULING, started, ended, size))
        self._count("requests", now, {"running": scheduler.num_running, "waiting": scheduler.num_waiting})
        self._count("blocks in use", now, {"blocks": blocks})

    def step_executed(self, started: int, step: SchedulerOutput) -> None:
        if step.only_transfers:
            return
        counts = step.num_scheduled_tokens
        size = {"step": step.number, "requests": len(counts), "tokens": sum(counts.values())}
        self._emit(self._slice("execute", _COMPUTING, started, self.now(), size))

    def step_processed(self, started: int, step: SchedulerOutput, updates: list[RequestUpdate]) -> None:
        if step.only_transfers:
            return
        ended = self.now()
        if self._prefilling:
            for update in updates:
                if update.request.request_id in self._prefilling:
                    self._enter(update.request.request_id, "decode", self._microseconds(ended))
        size = {"step": step.number, "requests": len(updates)}
        self._emit(self._slice("process", _SCHEDULING, started, ended, size))

    def request_finished(self, request: Request, reason: FinishReason | None) -> None:
        result = {
            "finish_reason": str(reason and reason.value),
            "output_tokens": request.num_output_tokens,
            "cached_tokens": request.num_cached_tokens,
            "preemptions": request.num_preemptions,
        }
        self._end(request.request_id, self._microseconds(self.now()), result)

    def close(self) -> None:
        now = self._microseconds(self.now())
        for request_id in list(self._phases):
            self._end(request_id, now, {"finish_reason": "engine stopped"})
        self._writer.close()

    def _num_prefill_tokens(self, step: SchedulerOutput, scheduler: Scheduler) -> int:
        """Scheduled tokens of prompts, and of what preempted requests had got to."""
        num_tokens = 0
        for request_id in self._prefilling & step.num_scheduled_tokens.keys():
            request, count = scheduler.requests[request_id], step.num_scheduled_tokens[request_id]
            if request.num_computed_tokens + request.num_in_flight - count < request.num_tokens:
                num_tokens += count
        return num_tokens

    def _enter(self, request_id: str, phase: str, now: float) -> None:
        self._emit(_span("e", request_id, self._phases[request_id], now))
        self._set_phase(request_id, phase)
        self._emit(_span("b", request_id, phase, now))

    def _set_phase(self, request_id: str, phase: str) -> None:
        self._phases[request_id] = phase
        if phase == "prefill":
            self._prefilling.add(request_id)
        else:
            self._prefilling.discard(request_id)

    def _end(self, request_id: str, now: float, result: dict[str, object]) -> None:
        self._emit(_span("e", request_id, self._phases.pop(request_id), now))
        self._prefilling.discard(request_id)
        self._emit(_span("e", request_id, request_id, now, result))

    def _slice(self, name: str, tid: int, started: int, ended: int, args: dict[str, int]) -> TraceEvent:
        return {
            "ph": "X",
            "name": name,
            "pid": self._pid,
            "tid": tid,
            "ts": self._microseconds(started),
            "dur": (ended - started) / 1000,
            "args": args,
        }

    def _count(self, name: str, now: float, values: dict[str, int]) -> None:
        if self._counters.get(name) != values:
            self._counters[name] = values
            self._emit({"ph": "C", "name": name, "pid": self._pid, "ts": now, "args": values})

    def _microseconds(self, nanoseconds: int) -> float:
        return (nanoseconds - self._start) / 1000


def _span(phase: str, request_id: str, name: str, now: float, args: dict[str, object] | None = None) -> TraceEvent:
    event: TraceEvent = {
        "ph": phase,
        "cat": "request",
        "id": request_id,
        "name": name,
        "pid": os.getpid(),
        "tid": _SCHEDULING,
        "ts": now,
    }
    if args:
        event["args"] = args
    return event
