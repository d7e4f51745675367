"""Events over NATS: the stream on a subject, what was missed by requests on another one."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import threading
from functools import partial
from urllib.parse import urlsplit

from nats.aio.client import Client
from nats.aio.msg import Msg

from ksana.errors import UsageError
from ksana.kv_events.log import EncodedBatch, EventLog
from ksana.kv_events.wire import END_ID, ID_BYTES, encode_id
from ksana.types.config import KVEventsConfig

logger = logging.getLogger(__name__)

DEFAULT_ENDPOINT = "nats://127.0.0.1:4222"
DEFAULT_SUBJECT = "ksana.kv_events"
LONGEST_SUBJECT_BYTES = 1000
"""NATS takes lines of 4096 bytes, which have also the reply subject of a request, or the prefix of an account."""

_BATCHES_A_TURN = 256
_RECONNECT_S = 1
_CONNECT_TIMEOUT_S = 2
_WAITING_REQUESTS = 256
_LINGER_S = 1.0
_JOIN_TIMEOUT_S = 2.0


class NatsPublisher:
    """Publishes the batches of ``log``, on an event loop and a thread of its own.

    A message is an id and the payload behind it. Requests go to the subject with ``.replay`` behind it; the answer is
    one message for each batch, then the id of the end. While there is no connection nothing is sent, and afterwards it
    goes on where it stopped, if the log still has that. A batch that is larger than what the server takes is left out:
    consumers see the gap, ask, and get smaller ones.

    Raises:
        UsageError: the address or the subject is wrong. A server that cannot be reached is waited for.
    """

    def __init__(self, config: KVEventsConfig, log: EventLog) -> None:
        self._server = config.endpoint or DEFAULT_ENDPOINT
        self._subject = config.topic or DEFAULT_SUBJECT
        _check(self._server, self._subject)
        self._log = log
        self._published_id = log.last_id
        self._loop = asyncio.new_event_loop()
        self._news = asyncio.Event()
        self._stopping = asyncio.Event()
        self._is_reachable = True
        self._has_left_out = False
        self._thread = threading.Thread(target=self._run, name="ksana-kv-events", daemon=True)
        self._thread.start()

    def notify(self) -> None:
        self._call(self._news)

    def close(self) -> None:
        self._call(self._stopping)
        self._thread.join(_JOIN_TIMEOUT_S)

    def _call(self, event: asyncio.Event) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(event.set)

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._serve_until_stopped())
        except Exception:
            logger.exception("KV events are no longer published")
        finally:
            self._loop.close()

    async def _serve_until_stopped(self) -> None:
        serving = asyncio.create_task(self._serve())
        stopping = asyncio.create_task(self._stopping.wait())
        await asyncio.wait((serving, stopping), return_when=asyncio.FIRST_COMPLETED)
        for task in (serving, stopping):
            task.cancel()
        await asyncio.wait((serving, stopping))
        if not serving.cancelled():
            serving.result()  # raises what has ended it

    async def _serve(self) -> None:
        """Publish for ever, over one connection after the other; a lost one comes back by itself as a rule."""
        while True:
            client = Client()
            try:
                await client.connect(
                    self._server,
                    name="ksana-kv-events",
                    error_cb=self._on_error,
                    disconnected_cb=self._on_disconnect,
                    reconnected_cb=self._on_connect,
                    closed_cb=self._on_close,
                    connect_timeout=_CONNECT_TIMEOUT_S,
                    reconnect_time_wait=_RECONNECT_S,
                    max_reconnect_attempts=-1,
                )
                replay = f"{self._subject}.replay"
                answer = partial(self._answer, client)
                await client.subscribe(replay, cb=answer, pending_msgs_limit=_WAITING_REQUESTS)
                await self._on_connect()
                await self._publish_while_open(client)
            except Exception as error:  # whoever listens there may be no NATS server at all
                logger.debug("the connection to NATS has failed", exc_info=True)
                await self._on_error(error)
            finally:
                await self._close(client)
            await asyncio.sleep(_RECONNECT_S)

    async def _publish_while_open(self, client: Client) -> None:
        while not client.is_closed:
            await self._news.wait()
            self._news.clear()
            await self._publish(client)

    async def _publish(self, client: Client) -> None:
        while client.is_connected and (batches := self._log.after(self._published_id, _BATCHES_A_TURN)):
            for batch in batches:
                if ID_BYTES + len(batch.payload) <= client.max_payload:
                    await client.publish(self._subject, _message(batch))
                elif not self._has_left_out:
                    self._has_left_out = True
                    logger.warning(
                        "batches of KV events above %d bytes, the NATS server's max_payload, are left out: consumers "
                        "must ask for what they miss (said once)",
                        client.max_payload,
                    )
                self._published_id = batch.event_id

    async def _close(self, client: Client) -> None:
        """Send what is left if that is possible, and be done with it in a moment."""
        with contextlib.suppress(Exception):
            await asyncio.wait_for(self._flush_and_close(client), _LINGER_S)

    async def _flush_and_close(self, client: Client) -> None:
        try:
            if client.is_connected:
                await self._publish(client)
                await client.flush()
        finally:
            await client.close()

    async def _answer(self, client: Client, request: Msg) -> None:
        """Answer one request; the next one waits so long."""
        if not request.reply:
            return
        try:
            batches = self._log.answer(request.data, client.max_payload - ID_BYTES)
        except ValueError:
            logger.debug("not a request for KV events: %r", request.data)
            return
        for batch in batches:
            await client.publish(request.reply, _message(batch))
        await client.publish(request.reply, encode_id(END_ID))

    async def _on_connect(self) -> None:
        logger.log(
            logging.INFO if self._is_reachable else logging.WARNING,
            "KV events are sent to %s, subject %s",
            _without_password(self._server),
            self._subject,
        )
        self._is_reachable = True
        self._news.set()

    async def _on_disconnect(self) -> None:
        await self._on_error(ConnectionError("the connection is lost"))

    async def _on_close(self) -> None:
        self._news.set()

    async def _on_error(self, error: Exception) -> None:
        if self._is_reachable and not self._stopping.is_set():
            logger.warning("KV events cannot be sent to %s: %s", _without_password(self._server), _reason(error))
            self._is_reachable = False


def _message(batch: EncodedBatch) -> bytes:
    return encode_id(batch.event_id) + batch.payload


def _check(server: str, subject: str) -> None:
    try:
        parts = urlsplit(server)
        valid = parts.scheme in ("nats", "tls", "ws", "wss") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        valid = False
    if not valid:
        raise UsageError("--kv-events-endpoint is no address of a NATS server: it must be like nats://127.0.0.1:4222")
    size = len(subject.encode())
    if size > LONGEST_SUBJECT_BYTES:
        raise UsageError(
            f"--kv-events-topic of {size} bytes is no NATS subject: it may have {LONGEST_SUBJECT_BYTES} at most"
        )
    if not re.fullmatch(r"[^\s.*>]+(\.[^\s.*>]+)*", subject):
        raise UsageError(f"--kv-events-topic {subject!r} is no NATS subject: it must be like ksana.kv_events")


def _reason(error: Exception) -> str:
    """What has happened, also in words where the error has none."""
    if isinstance(error, asyncio.TimeoutError):
        return str(error) or f"no answer within {_CONNECT_TIMEOUT_S} s"
    return str(error) or type(error).__name__


def _without_password(server: str) -> str:
    scheme, _, rest = server.partition("://")
    return f"{scheme}://{rest.rpartition('@')[2]}"
