"""Who may use the server: its own API keys, and whatever plugins know of other credentials."""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from ksana.errors import RequestError, UsageError
from ksana.plugin.maybe_await import call_first
from ksana.types.config import KsanaConfig, ServerConfig
from ksana.types.identity import ANONYMOUS, Identity

if TYPE_CHECKING:
    from ksana.plugin.manager import KsanaPluginManager

HandlerT = TypeVar("HandlerT", bound=Callable[..., Any])

IDENTITY: web.RequestKey[Identity] = web.RequestKey("ksana_identity", Identity)

_KEY = re.compile(r"[\x21-\x7e]+")
_PUBLIC_MARK = "_ksana_public"


def public(handler: HandlerT) -> HandlerT:
    """Mark a route handler that answers everybody: it must neither cost much nor tell anything about the model."""
    setattr(handler, _PUBLIC_MARK, True)
    return handler


def identity_of(request: web.Request) -> Identity:
    """Who sent ``request``; :data:`ANONYMOUS` where no key was asked for."""
    identity: Identity = request.get(IDENTITY, ANONYMOUS)
    return identity


class ApiKeys:
    """The keys of a server, of which only digests are kept.

    Args:
        keys: none of them empty.
    """

    def __init__(self, keys: Iterable[str] = ()) -> None:
        self._digests = [_digest(key) for key in dict.fromkeys(keys)]

    @classmethod
    def of(cls, config: ServerConfig) -> ApiKeys:
        """The keys that ``config`` names.

        Raises:
            UsageError: the file cannot be read or holds no key, or a key is empty or has a character that no header
                could carry. The message says where, and never shows the key.
        """
        return cls(_configured_keys(config))

    def __bool__(self) -> bool:
        return bool(self._digests)

    def identify(self, request: web.Request) -> Identity | None:
        """The client whose key ``request`` carries, named by the key's place among the keys, or None."""
        found = None
        for given in _keys_in(request):
            digest = _digest(given)
            # All are compared, so that the time tells nothing about which one was nearly right.
            for number, known in enumerate(self._digests, 1):
                if hmac.compare_digest(digest, known):
                    found = Identity(f"api-key-{number}")
        return found


class Authentication:
    """Decides who a client is: plugins are asked first, then the server's own keys."""

    def __init__(self, config: KsanaConfig, plugin_manager: KsanaPluginManager) -> None:
        self._config = config
        self._plugin_manager = plugin_manager
        self._keys = ApiKeys.of(config.server)

    @property
    def required(self) -> bool:
        """False if everybody may use the server. A plugin that comes with the model may change that."""
        return bool(self._keys) or bool(self._plugin_manager.hook.ksana_authenticate.get_hookimpls())

    async def identify(self, request: web.Request) -> Identity:
        """The client that sent ``request``.

        Raises:
            RequestError: 401 if nobody knows it, or what a plugin raises.
        """
        identity: Identity | None = await call_first(
            self._plugin_manager, "ksana_authenticate", request=request, config=self._config
        )
        identity = identity or self._keys.identify(request)
        if identity is None:
            raise _unauthorized(next(_keys_in(request), None) is not None)
        return identity

    def is_public(self, request: web.Request) -> bool:
        """True if ``request`` is answered whoever sent it."""
        if getattr(request.match_info.handler, _PUBLIC_MARK, False):
            return True
        server = self._config.server
        return (server.public_health and request.path in ("/health", "/ready")) or (
            server.public_metrics and request.path == "/metrics"
        )


def authentication_middleware(authentication: Authentication) -> Middleware:
    """Refuse with 401 whoever is unknown, before a byte of the body is read."""

    @web.middleware
    async def authenticate(request: web.Request, handler: Handler) -> web.StreamResponse:
        if not authentication.is_public(request):
            request[IDENTITY] = await authentication.identify(request)
        return await handler(request)

    return authenticate


def _configured_keys(config: ServerConfig) -> Iterator[str]:
    for number, secret in enumerate(config.api_keys, 1):
        yield _checked(secret.get_secret_value(), f"API key {number}")
    if not config.api_key_file:
        return
    found = False
    for number, line in enumerate(_read_lines(config.api_key_file), 1):
        if (key := line.strip()) and not key.startswith("#"):
            found = True
            yield _checked(key, f"{config.api_key_file}: line {number}")
    if not found:
        raise UsageError(f"--api-key-file {config.api_key_file} holds no key; write one a line")


def _read_lines(file: str) -> list[str]:
    try:
        return Path(file).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise UsageError(f"cannot read --api-key-file {file}: {reason}") from None


def _checked(key: str, where: str) -> str:
    if not _KEY.fullmatch(key):
        raise UsageError(f"{where} is empty or holds a space or a character beyond ASCII, which no client can send")
    return key


def _digest(key: str) -> bytes:
    # aiohttp decodes headers so that any byte survives.
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def _keys_in(request: web.Request) -> Iterator[str]:
    """The keys that a client shows; one of them must be right. A proxy may have put its own into ``Authorization``."""
    scheme, _, credentials = request.headers.get("Authorization", "").partition(" ")
    if scheme.lower() == "bearer" and credentials.strip():
        yield credentials.strip()
    if key := request.headers.get("X-Api-Key"):
        yield key


def _unauthorized(has_key: bool) -> RequestError:
    return RequestError(
        "the API key is wrong" if has_key else "this server needs an API key: send it as 'Authorization: Bearer KEY'",
        status=401,
        code="invalid_api_key",
    )
