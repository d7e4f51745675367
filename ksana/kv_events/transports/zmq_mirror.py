"""A mirror of a cache in another process, over ZeroMQ."""

from __future__ import annotations

import logging
import math
import time
from types import TracebackType

import zmq

from ksana.kv_events.mirror import CacheMirror
from ksana.kv_events.wire import END_ID, decode_batch, decode_id, encode_id
from ksana.types.kv_events import EventBatch

logger = logging.getLogger(__name__)

_BATCHES_A_TURN = 256
_PAUSE_S = 0.1


class ZmqMirror:
    """Keeps a :class:`CacheMirror` up to date with an engine that publishes by :class:`ZmqPublisher`.

    Belongs to one thread. The engine may come later, go, and come again.

    Args:
        endpoint, replay_endpoint: of the publisher.
        topic: what topics begin with.
        quiet_s: seconds without anything new after which it asks whether it has missed something.
        answer_timeout_s: seconds after which an answer that goes no further is given up, and asked for again.

    Attributes:
        mirror: what is known.
    """

    def __init__(
        self,
        endpoint: str,
        replay_endpoint: str,
        topic: str = "",
        *,
        quiet_s: float = 1.0,
        answer_timeout_s: float = 5.0,
    ) -> None:
        self.mirror = CacheMirror()
        self._replay_endpoint = replay_endpoint
        self._quiet_s = quiet_s
        self._answer_timeout_s = answer_timeout_s
        self._context = zmq.Context()
        self._stream = self._context.socket(zmq.SUB)
        self._stream.setsockopt_string(zmq.SUBSCRIBE, topic)
        self._stream.connect(endpoint)
        self._poller = zmq.Poller()
        self._poller.register(self._stream, zmq.POLLIN)
        self._requests = self._connect_requests()
        self._answer: list[EventBatch] | None = None  # None while nothing has been asked
        self._heard_s = self._asked_s = self._answered_s = -quiet_s

    def poll(self, timeout_s: float) -> list[EventBatch]:
        """Wait for something new, for ``timeout_s`` seconds at most, and ask for what is missing.

        Returns:
            The batches that the stream has brought. They are part of the mirror by now, if none before them is missing.
        """
        wait_s = min(timeout_s, max(0.0, self._ask_if_needed()))
        ready = dict(self._poller.poll(math.ceil(wait_s * 1000)))
        batches = self._receive() if self._stream in ready else []
        if self._requests in ready:
            self._receive_answer()
        return batches

    def close(self) -> None:
        """Leave."""
        self._context.destroy(linger=0)

    def __enter__(self) -> ZmqMirror:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _receive(self) -> list[EventBatch]:
        batches: list[EventBatch] = []
        while len(batches) < _BATCHES_A_TURN and self._stream.poll(0):
            batch = _decode(self._stream.recv_multipart()[1:])
            if batch is not None:
                last_id = self.mirror.last_id
                self.mirror.receive(batch)
                batches.append(batch)
                if self.mirror.last_id != last_id:
                    self._heard_s = time.monotonic()
        return batches

    def _receive_answer(self) -> None:
        while self._answer is not None and self._requests.poll(0):
            frames = self._requests.recv_multipart()[2:]
            self._answered_s = time.monotonic()
            if frames[:1] == [encode_id(END_ID)]:
                self.mirror.answer(self._answer)
                self._answer = None
            elif (batch := _decode(frames)) is not None:
                self._answer.append(batch)

    def _ask_if_needed(self) -> float:
        """Returns in how many seconds it is to be called again, if nothing comes meanwhile."""
        now = time.monotonic()
        if self._answer is not None:
            give_up_s = max(self._asked_s, self._answered_s) + self._answer_timeout_s
            if now < give_up_s:
                return give_up_s - now
            # With the socket goes the rest of the answer, if it comes after all.
            self._poller.unregister(self._requests)
            self._requests.close(linger=0)
            self._requests = self._connect_requests()
            self._answer = None
        quiet_s = now - max(self._heard_s, self._answered_s)
        wait_s = self._quiet_s - quiet_s if self.mirror.is_complete else self._asked_s + _PAUSE_S - now
        if wait_s > 0:
            return wait_s
        self._requests.send_multipart((b"", self.mirror.ask()))
        self._answer = []
        self._asked_s = now
        return self._answer_timeout_s

    def _connect_requests(self) -> zmq.Socket[bytes]:
        requests = self._context.socket(zmq.DEALER)
        requests.connect(self._replay_endpoint)
        self._poller.register(requests, zmq.POLLIN)
        return requests


def _decode(frames: list[bytes]) -> EventBatch | None:
    try:
        event_id, payload = frames
        return decode_batch(decode_id(event_id), payload)
    except ValueError as error:
        logger.warning("unreadable KV events are ignored: %s", error)
        return None
