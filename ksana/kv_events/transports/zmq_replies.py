"""Answers to consumers that have missed something, sent at the pace at which each of them reads."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import zmq

from ksana.kv_events.log import EncodedBatch, EventLog
from ksana.kv_events.wire import END_ID, encode_id

logger = logging.getLogger(__name__)

_MOST_CLIENTS = 64
_BATCHES_A_TURN = 64
_STUCK_S = 30.0
_END = EncodedBatch(END_ID, b"")


@dataclass(slots=True)
class _Reply:
    """What one client is still to be sent.

    Attributes:
        next: the batch to be sent next; None once the end has been sent.
        moved_s: when something could be sent.
    """

    batches: Iterator[EncodedBatch]
    next: EncodedBatch | None = None
    moved_s: float = field(default_factory=time.monotonic)

    def take(self) -> None:
        """Go on to the next batch, or the end."""
        self.next = next(self.batches, None if self.next is _END else _END)


class ReplyQueue:
    """The answers that are being sent through a ROUTER socket.

    A request is an empty frame and the id from which on batches are missing. Each message of the answer is an empty
    frame and the three frames of the stream: topic, id, payload; at the end come the id of the end and no payload.
    Memory is bounded: a client has one answer at a time, of which it is sent no more than its socket takes.
    """

    def __init__(self, router: zmq.Socket[bytes], log: EventLog, topic: bytes) -> None:
        router.setsockopt(zmq.ROUTER_MANDATORY, 1)  # without it, what a client cannot take yet would vanish
        self._router = router
        self._log = log
        self._topic = topic
        self._replies: dict[bytes, _Reply] = {}

    def __len__(self) -> int:
        return len(self._replies)

    def accept(self) -> None:
        """Take in the requests that have come."""
        for _ in range(_MOST_CLIENTS):
            try:
                client, *frames = self._router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                [_, request] = frames
                batches = self._log.answer(request)
            except ValueError:
                logger.debug("not a request for KV events: %r", frames)
                continue
            if client in self._replies or len(self._replies) < _MOST_CLIENTS:
                reply = self._replies[client] = _Reply(batches)
                reply.take()

    def advance(self) -> bool:
        """Send some of each answer. True if anything could be sent."""
        progress = False
        for client, reply in list(self._replies.items()):
            if self._send_some(client, reply):
                progress = True
            elif time.monotonic() - reply.moved_s > _STUCK_S:
                reply.next = None
            if reply.next is None:
                del self._replies[client]
        return progress

    def _send_some(self, client: bytes, reply: _Reply) -> bool:
        sent = False
        for _ in range(_BATCHES_A_TURN):
            if reply.next is None:
                break
            try:
                frames = (client, b"", self._topic, encode_id(reply.next.event_id), reply.next.payload)
                self._router.send_multipart(frames, zmq.NOBLOCK)
            except zmq.Again:
                break
            except zmq.ZMQError:  # the client is gone
                reply.next = None
                break
            sent = True
            reply.moved_s = time.monotonic()
            reply.take()
        return sent
