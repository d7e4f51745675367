"""Finding out what a server is: which API it speaks, what its model is called and how much that takes."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Any

import aiohttp
import orjson

from ksana.bench.client import describe_failure
from ksana.bench.options import Api, ServerOptions
from ksana.errors import UsageError

_PROBE_TIMEOUT = aiohttp.ClientTimeout(total=30, sock_connect=10)
_POLL_INTERVAL_S = 0.5


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """What a server says of itself.

    Attributes:
        api: the one to use, no longer ``auto``.
        max_model_len: tokens of a prompt and its answer, if the server tells.
    """

    api: Api
    model: str | None
    max_model_len: int | None


async def discover(session: aiohttp.ClientSession, options: ServerOptions) -> ServerInfo:
    """Ask the first server for its models; one without a list of them must be a native server.

    Raises:
        UsageError: it cannot be reached, or does not say enough.
    """
    url = options.urls[0]
    status, body = await _get(session, f"{url}/v1/models", wait_s=options.wait_s)
    models = _models(body) if status == 200 else None
    if models:
        api: Api = "completions" if options.api == "auto" else options.api
        card = next((model for model in models if model.get("id") == options.model), models[0])
        max_len = card.get("max_model_len")
        return ServerInfo(api, options.model or str(card["id"]), max_len if isinstance(max_len, int) else None)
    if status in (401, 403):
        raise UsageError(f"{url} refuses the key (HTTP {status}); pass --api-key, or set OPENAI_API_KEY")
    if options.api == "generate" or (options.api == "auto" and status in (404, 405)):
        return ServerInfo("generate", options.model, None)
    if options.api != "auto" and options.model:
        return ServerInfo(options.api, options.model, None)
    raise UsageError(
        f"{url}/v1/models answered {status if models is None and status != 200 else 'without a list of models'}; "
        "name the API and the model with --api and --model"
    )


async def _get(session: aiohttp.ClientSession, url: str, *, wait_s: float) -> tuple[int, bytes]:
    deadline = time.monotonic() + wait_s
    while True:
        try:
            async with session.get(url, timeout=_PROBE_TIMEOUT) as response:
                return response.status, await response.read()
        except (aiohttp.ClientError, asyncio.TimeoutError, OSError, ValueError) as error:
            if time.monotonic() >= deadline:
                failure = "no answer" if isinstance(error, asyncio.TimeoutError) else describe_failure(error).kind
                raise UsageError(
                    f"no server to measure at {url}: {failure}; is it running? "
                    "(--host, --port or --base-url say where, --wait how long to wait for its start)"
                ) from None
        await asyncio.sleep(_POLL_INTERVAL_S)


def _models(body: bytes) -> list[dict[str, Any]] | None:
    try:
        data = orjson.loads(body)["data"]
        return data if isinstance(data, list) and all("id" in model for model in data) else None
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return None
