"""One request over HTTP, measured."""

from __future__ import annotations

import asyncio
import errno
import socket
import time
from dataclasses import dataclass

import aiohttp
import orjson

from ksana.bench.answers import AnswerReader, BadAnswerError, error_message
from ksana.bench.records import Failure, RequestRecord

_MAX_DETAIL = 300
_CONNECT_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class Exchange:
    """A request that is ready to be sent.

    Attributes:
        body: JSON, encoded before the clock runs.
        prompt_tokens, prompt_chars: of the prompt, where they are known before the server tells.
    """

    index: int
    url: str
    body: bytes
    reader: AnswerReader
    offset_s: float = 0.0
    prompt_tokens: int | None = None
    prompt_chars: int | None = None


def open_session(headers: dict[str, str], *, request_timeout_s: float, stall_timeout_s: float) -> aiohttp.ClientSession:
    """A session with no limit of connections and a deadline on every wait."""
    timeout = aiohttp.ClientTimeout(
        total=request_timeout_s, sock_connect=min(_CONNECT_TIMEOUT_S, request_timeout_s), sock_read=stall_timeout_s
    )
    # Idle connections are given up before common servers do, so that no request meets one that is just being closed.
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=3)
    # Compression would collect a stream in the server.
    fixed = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
    return aiohttp.ClientSession(connector=connector, timeout=timeout, headers={**fixed, **headers})


async def send(session: aiohttp.ClientSession, exchange: Exchange) -> RequestRecord:
    """Send one request and read its answer. Whatever goes wrong is in the record; only a cancellation is raised."""
    record = RequestRecord(index=exchange.index, sent_s=time.perf_counter())
    try:
        async with session.post(exchange.url, data=exchange.body) as response:
            if response.status == 200:
                await _read(response, exchange.reader)
            else:
                record.failure = Failure(f"HTTP {response.status}", await _refusal(response))
    except BadAnswerError as error:
        record.failure = Failure(error.kind, _shorten(error.detail))
    except (aiohttp.ClientError, asyncio.TimeoutError, OSError, ValueError) as error:
        record.failure = describe_failure(error)
    record.end_s = time.perf_counter()
    _take_over(record, exchange)
    return record


def describe_failure(error: Exception) -> Failure:
    """Say what a failed connection failed of."""
    if isinstance(error, aiohttp.ConnectionTimeoutError):
        return Failure("timeout while connecting", "the server did not accept the connection")
    if isinstance(error, aiohttp.SocketTimeoutError):
        return Failure("stalled", "the server sent nothing for as long as --stall-timeout allows")
    if isinstance(error, asyncio.TimeoutError):
        return Failure("timeout", "the answer took longer than --client-timeout allows")
    if isinstance(error, aiohttp.ClientConnectorError):
        cause = error.os_error
        if isinstance(cause, socket.gaierror):
            return Failure("unknown host", _shorten(str(error)))
        refused = isinstance(cause, ConnectionRefusedError) or cause.errno == errno.ECONNREFUSED
        return Failure("connection refused" if refused else "cannot connect", _shorten(str(error)))
    if isinstance(error, (aiohttp.ClientPayloadError, aiohttp.ClientConnectionError, OSError)):
        return Failure("connection lost", _shorten(str(error)))
    return Failure("invalid HTTP", _shorten(str(error) or repr(error)))


async def _read(response: aiohttp.ClientResponse, reader: AnswerReader) -> None:
    async for data in response.content.iter_any():
        reader.feed(data, time.perf_counter())
    reader.finish(time.perf_counter())


async def _refusal(response: aiohttp.ClientResponse) -> str:
    body = await response.read()
    try:
        return _shorten(error_message(orjson.loads(body)))
    except orjson.JSONDecodeError:
        return _shorten(body.decode(errors="replace"))


def _take_over(record: RequestRecord, exchange: Exchange) -> None:
    reader = exchange.reader
    record.chunk_times = reader.chunk_times
    record.prompt_tokens = exchange.prompt_tokens if reader.prompt_tokens is None else reader.prompt_tokens
    record.prompt_chars = exchange.prompt_chars
    record.cached_tokens = reader.cached_tokens
    record.output_tokens = reader.output_tokens
    record.count_source = reader.count_source
    record.text = reader.text
    record.finish_reason = reader.finish_reason


def _shorten(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _MAX_DETAIL else line[: _MAX_DETAIL - 3] + "..."
