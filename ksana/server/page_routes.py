"""The files of the page at ``/``: read once, at the start, and kept by browsers for as long as they stay the same."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Final

from aiohttp import ETag, web

from ksana.server.auth import public
from ksana.server.operations import describes

FOLDER: Final = Path(__file__).parent / "page"

CONTENT_TYPES: Final = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
}

HEADERS: Final = {
    # Nothing from elsewhere, nothing inline, nowhere to send a form, and text never becomes markup.
    "Content-Security-Policy": (
        "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'; trusted-types 'none'"
    ),
    # Browsers ask each time, and hear 304: a new version of Ksana must not meet files of an old one.
    "Cache-Control": "no-cache",
}


class PageFiles:
    """Serves the page and what it loads. No key is needed: the page asks for one when it talks to the model."""

    def __init__(self) -> None:
        self._files = {path.name: _PageFile(path) for path in FOLDER.iterdir() if path.suffix in CONTENT_TYPES}

    @public
    @describes("A page to chat with the model and to watch the engine", media_type="text/html")
    async def index(self, request: web.Request) -> web.Response:
        """The page itself."""
        return self._files["index.html"].answer(request)

    @public
    @describes("A file that the page loads", media_type="*/*")
    async def file(self, request: web.Request) -> web.Response:
        """The file ``name``."""
        file = self._files.get(request.match_info["name"])
        if file is None:
            raise web.HTTPNotFound
        return file.answer(request)


class _PageFile:
    """One file, in memory."""

    def __init__(self, path: Path) -> None:
        self._body = path.read_bytes()
        self._content_type = CONTENT_TYPES[path.suffix]
        self._etag = ETag(hashlib.sha256(self._body).hexdigest()[:32])

    def answer(self, request: web.Request) -> web.Response:
        """The file, or 304 if the browser has it."""
        if any(etag.value in (self._etag.value, "*") for etag in request.if_none_match or ()):
            response = web.Response(status=304, headers=HEADERS)
        else:
            response = web.Response(body=self._body, content_type=self._content_type, charset="utf-8", headers=HEADERS)
        response.etag = self._etag
        return response
