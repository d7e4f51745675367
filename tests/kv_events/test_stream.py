"""A consumer follows a real cache over a line that loses, repeats and delays, and engines that are started again.

What it holds is at every moment what the cache held when the last batch that it knows was published; and once the line
works, it holds what the cache holds.
"""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ksana.kv import KVCacheManager
from ksana.kv_events.block_hash import external_hash
from ksana.kv_events.log import EncodedBatch, EventLog
from ksana.kv_events.mirror import CacheMirror
from ksana.kv_events.recorder import KVEventRecorder
from ksana.kv_events.wire import decode_batch
from ksana.testing.paged_memory import make_kv_config
from ksana.types.kv_events import EventBatch
from ksana.types.request import Request
from ksana.types.sampling import SamplingParams

LAYOUTS = ([None], [None], [None, 4], [3, 6])
BLOCK_SIZE = 2
LONGEST = 14

Content = list[set[int]]


class Line:
    """Between an engine's log and a consumer: what has been sent and has not arrived."""

    def __init__(self) -> None:
        self.messages: list[EncodedBatch] = []
        self._log: EventLog | None = None
        self._sent_id = 0

    def connect(self, log: EventLog) -> None:
        self._log, self._sent_id = log, log.last_id

    def notify(self) -> None:
        assert self._log is not None
        self.messages += self._log.after(self._sent_id)
        self._sent_id = self._log.last_id

    def close(self) -> None:
        pass


def decode(batches: list[EncodedBatch]) -> list[EventBatch]:
    return [decode_batch(batch.event_id, batch.payload) for batch in batches]


class EventStreamMachine(RuleBasedStateMachine):
    @initialize(
        layout=st.sampled_from(LAYOUTS), num_blocks=st.integers(9, 16), buffer_steps=st.sampled_from([1, 3, 50])
    )
    def create(self, layout: list[int | None], num_blocks: int, buffer_steps: int) -> None:
        self.config = make_kv_config(num_blocks, BLOCK_SIZE, layout)
        self.buffer_steps = buffer_steps
        self.history: dict[int, Content] = {}
        self.blocks: dict[int, tuple[int | None, list[int]]] = {}
        self.line = Line()
        self.mirror = CacheMirror()
        self.answer: list[EventBatch] | None = None
        self.arrived = self.received_id = 0
        self.lowest_id = self.highest_id = 10_000_000
        self._start_engine(first_id=self.lowest_id)

    def _start_engine(self, first_id: int) -> None:
        self.first_id = first_id
        self.log = EventLog(self.buffer_steps, first_id)
        self.line.connect(self.log)
        self.recorder = KVEventRecorder(self.config, self.log, self.line)
        self.kv = KVCacheManager(self.config, observer=self.recorder)
        self.live: list[Request] = []
        self._remember()

    # -- the engine ------------------------------------------------------------------------------------------------

    @rule(
        length=st.integers(1, LONGEST),
        flipped=st.integers(0, LONGEST),
        chunk=st.integers(1, LONGEST),
        ends_step=st.booleans(),
    )
    def admit(self, length: int, flipped: int, chunk: int, ends_step: bool) -> None:
        self.arrived += 1
        tokens = [int(index == flipped) for index in range(length)]
        request = Request(f"r{self.arrived}", tokens, SamplingParams(), max_total_tokens=1000)
        hit = self.kv.find_prefix(request)
        chunk = min(chunk, length - hit.num_tokens)
        if self.kv.admit(request, hit, chunk) is not None:
            request.num_computed_tokens = hit.num_tokens
            self.live.append(request)
            self._compute(request, chunk, ends_step)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), count=st.integers(1, 5), ends_step=st.booleans())
    def go_on(self, data: st.DataObject, count: int, ends_step: bool) -> None:
        request = data.draw(st.sampled_from(self.live))
        while request.num_tokens < request.num_computed_tokens + count:
            request.all_token_ids.append(0)
        if self.kv.grow(request, count) is not None:
            self._compute(request, count, ends_step)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.live))
        self.live.remove(request)
        self.kv.free(request)

    @rule()
    def reset_prefix_cache(self) -> None:
        self.kv.reset_prefix_cache()
        self._remember()

    @rule(clock_was_set_back=st.booleans())
    def restart(self, clock_was_set_back: bool) -> None:
        if clock_was_set_back:
            self.lowest_id -= 10_000
            self.received_id = 0  # ids of the engine before say nothing any more
            self._start_engine(self.lowest_id)
        else:
            self.highest_id += 10_000
            self._start_engine(self.highest_id)

    # -- the line --------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.line.messages)
    @rule(count=st.integers(1, 5))
    def deliver(self, count: int) -> None:
        for batch in decode(self.line.messages[:count]):
            self.mirror.receive(batch)
            if self.first_id <= batch.event_id <= self.log.last_id:  # not of an engine that is no more
                self.received_id = max(self.received_id, batch.event_id)
        del self.line.messages[:count]

    @precondition(lambda self: self.line.messages)
    @rule(count=st.integers(1, 3))
    def lose(self, count: int) -> None:
        del self.line.messages[:count]

    @precondition(lambda self: self.line.messages)
    @rule()
    def repeat(self) -> None:
        self.line.messages.insert(0, self.line.messages[0])

    @rule()
    def ask(self) -> None:
        """The answer is made now, and arrives later or never."""
        self.answer = decode(list(self.log.answer(self.mirror.ask())))

    @precondition(lambda self: self.answer is not None)
    @rule()
    def get_answer(self) -> None:
        assert self.answer is not None
        self.mirror.answer(self.answer)
        self.answer = None

    # -- what must hold --------------------------------------------------------------------------------------------

    @invariant()
    def mirror_holds_what_the_cache_held(self) -> None:
        if hasattr(self, "mirror") and self.mirror.last_id is not None:
            assert self._mirrored() == self.history[self.mirror.last_id]
            if self.mirror.is_complete:
                assert self.mirror.last_id >= self.received_id

    def teardown(self) -> None:
        if not hasattr(self, "mirror"):
            return
        self._end_step()
        self.deliver(len(self.line.messages))
        for _ in range(4):
            self.mirror.answer(decode(list(self.log.answer(self.mirror.ask()))))
        assert self.mirror.is_complete
        assert self._mirrored() == self._cached()
        for group in self.mirror.content.groups.values():
            for block_hash, block in group.blocks.items():
                assert (block.parent_block_hash, block.token_ids.tolist()) == self.blocks[block_hash]

    # -- parts -----------------------------------------------------------------------------------------------------

    def _compute(self, request: Request, count: int, ends_step: bool) -> None:
        request.num_computed_tokens += count
        self.kv.commit(request)
        parent = None
        for index, block_hash in enumerate(map(external_hash, request.block_hashes)):
            tokens = request.all_token_ids[index * BLOCK_SIZE : (index + 1) * BLOCK_SIZE]
            self.blocks[block_hash] = (parent, tokens)
            parent = block_hash
        if ends_step:
            self._end_step()

    def _end_step(self) -> None:
        self.recorder.flush()
        self._remember()

    def _remember(self) -> None:
        self.history[self.log.last_id] = self._cached()

    def _cached(self) -> Content:
        return [set(map(external_hash, self.kv.cached_hashes(g))) for g in range(len(self.config.groups))]

    def _mirrored(self) -> Content:
        return [self.mirror.content.block_hashes(g) for g in range(len(self.config.groups))]


TestEventStream = EventStreamMachine.TestCase
TestEventStream.settings = settings(max_examples=4 * settings().max_examples)  # losses matter only in a certain order
