"""Events over ZeroMQ, as vLLM publishes them: a PUB socket for the stream, a ROUTER socket for what was missed."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading

import zmq

from ksana.errors import UsageError
from ksana.kv_events.log import EventLog
from ksana.kv_events.transports.zmq_listener import SocketFile, listen, replay_endpoint_beside
from ksana.kv_events.transports.zmq_replies import ReplyQueue
from ksana.kv_events.wire import encode_id
from ksana.types.config import KVEventsConfig

logger = logging.getLogger(__name__)

DEFAULT_ENDPOINT = "tcp://127.0.0.1:5557"

_BATCHES_A_TURN = 256
_LARGEST_REQUEST_BYTES = 1024
_ANSWER_HWM = 256
"""Batches of an answer that wait in a client's socket; the others stay in the log."""
_BUSY_POLL_MS = 10
_ERROR_PAUSE_MS = 200
_LINGER_MS = 500
_JOIN_TIMEOUT_S = 2.0


class ZmqPublisher:
    """Publishes the batches of ``log``, on a thread of its own.

    A message of the stream has three frames: topic, id, payload. One for whom ``config.hwm`` of them wait gets no more
    until it has caught up.

    Attributes:
        endpoint: where the stream is.
        replay_endpoint: where to ask for what was missed.

    Raises:
        UsageError: an address is wrong, or in use.
    """

    def __init__(self, config: KVEventsConfig, log: EventLog) -> None:
        endpoint = config.endpoint or DEFAULT_ENDPOINT
        self._log = log
        self._topic = config.topic.encode()
        self._context = zmq.Context()
        self._files: list[SocketFile] = []
        try:
            self._stream = self._listen(zmq.PUB, "--kv-events-endpoint", endpoint, hwm=config.hwm)
            self.endpoint = self._stream.getsockopt_string(zmq.LAST_ENDPOINT)
            self._requests = self._listen(
                zmq.ROUTER,
                "--kv-events-replay-endpoint",
                config.replay_endpoint or replay_endpoint_beside(endpoint),
                hwm=_ANSWER_HWM,
            )
            self.replay_endpoint = self._requests.getsockopt_string(zmq.LAST_ENDPOINT)
        except UsageError:
            self._leave(linger_ms=0)
            raise
        self._replies = ReplyQueue(self._requests, log, self._topic)
        self._published_id = log.last_id
        # A pair of sockets, since those of ZeroMQ belong to one thread.
        self._news, self._news_sender = socket.socketpair()
        self._news.setblocking(False)
        self._news_sender.setblocking(False)
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="ksana-kv-events", daemon=True)
        self._thread.start()
        logger.info("KV events on %s, what was missed on %s", self.endpoint, self.replay_endpoint)

    def notify(self) -> None:
        with contextlib.suppress(OSError):  # full: the thread is about to look anyway; closed: it has ended
            self._news_sender.send(b"\0")

    def close(self) -> None:
        self._stopping = True
        self.notify()
        self._thread.join(_JOIN_TIMEOUT_S)

    def _listen(self, kind: int, flag: str, endpoint: str, *, hwm: int) -> zmq.Socket[bytes]:
        bound = self._context.socket(kind)
        bound.setsockopt(zmq.MAXMSGSIZE, _LARGEST_REQUEST_BYTES)
        bound.setsockopt(zmq.SNDHWM, hwm)
        file = listen(bound, flag, endpoint)
        if file is not None:
            self._files.append(file)
        return bound

    def _leave(self, *, linger_ms: int) -> None:
        for file in self._files:
            file.remove()
        self._context.destroy(linger=linger_ms)

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._news, zmq.POLLIN)
        poller.register(self._requests, zmq.POLLIN)
        wait_ms: int | None = None
        while not self._stopping:
            try:
                poller.poll(wait_ms)
                wait_ms = self._turn()
            except Exception:
                logger.exception("publishing KV events failed; going on")
                poller.poll(_ERROR_PAUSE_MS)
        with contextlib.suppress(zmq.ZMQError):
            while self._publish():
                pass
        self._leave(linger_ms=_LINGER_MS)
        self._news.close()
        self._news_sender.close()

    def _turn(self) -> int | None:
        """Publish, then answer. Returns how long to wait for something to do, in milliseconds; None for ever."""
        with contextlib.suppress(BlockingIOError):
            self._news.recv(4096)
        more = self._publish()
        self._replies.accept()
        progress = self._replies.advance()
        if more or progress:
            return 0
        return _BUSY_POLL_MS if self._replies else None

    def _publish(self) -> bool:
        """Send some of what is new. True if there was something."""
        batches = self._log.after(self._published_id, _BATCHES_A_TURN)
        for batch in batches:
            self._published_id = batch.event_id
            self._stream.send_multipart((self._topic, encode_id(batch.event_id), batch.payload))
        return bool(batches)
