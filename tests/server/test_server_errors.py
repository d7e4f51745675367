"""Every error has the one shape and a true status, and the server goes on."""

from __future__ import annotations

import asyncio
import gzip
import json
import logging
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from ksana.errors import UsageError
from ksana.markers import hookimpl
from ksana.plugin.manager import KsanaPluginManager
from ksana.server.app import create_app
from ksana.testing.scripted_engine import ScriptedEngine
from ksana.types.config import KsanaConfig

pytestmark = pytest.mark.anyio

JSON = {"Content-Type": "application/json"}
GOOD = b'{"prompt": "hi", "stream": false}'


def routes(**handlers: Any) -> SimpleNamespace:
    """A plugin that answers GET on /name for every handler."""

    @hookimpl
    def ksana_register_routes(app: web.Application, engine: Any, config: Any) -> None:
        for name, handler in handlers.items():
            app.router.add_get(f"/{name}", handler)

    return SimpleNamespace(ksana_register_routes=ksana_register_routes)


async def post(
    session: aiohttp.ClientSession, data: bytes, headers: dict[str, str] | None = None
) -> tuple[int, dict[str, Any]]:
    async with session.post("/generate", data=data, headers=JSON if headers is None else headers) as response:
        return response.status, await response.json()


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "not valid JSON"),
        (b'{"prompt": "x",}', "line 1 column"),
        (b'{"prompt": NaN}', "not valid JSON"),
        (b'{"prompt": "\\ud800"}', "not valid JSON"),
        (b'{"prompt": "\xff"}', "not valid JSON"),
        (b'{"a":' * 500 + b"1" + b"}" * 500, "recursion"),
        (b"[" * 100_000, "recursion"),
        (b'{"seed": ' + b"9" * 10_000 + b"}", "out of range"),
        (b"[1, 2]", "object"),
        (b'"text"', "object"),
        (b"null", "object"),
    ],
)
async def test_what_is_not_a_json_object_is_refused(serving, engine: ScriptedEngine, data: bytes, words: str) -> None:
    async with serving(engine) as session:
        status, body = await post(session, data)
        assert status == 400
        assert words in body["error"]["message"]
        assert body["error"]["code"] == "invalid_json"
        assert (await post(session, GOOD))[0] == 200


@pytest.mark.parametrize(
    ("content_type", "status"),
    [
        ("application/json", 200),
        ("application/json; charset=utf-8", 200),
        ("application/vnd.api+json", 200),
        ("application/x-www-form-urlencoded", 415),
        ("text/plain", 415),
        ("multipart/form-data; boundary=x", 415),
    ],
)
async def test_content_type(serving, engine: ScriptedEngine, content_type: str, status: int) -> None:
    async with serving(engine) as session:
        got, body = await post(session, GOOD, {"Content-Type": content_type})
        assert got == status
        if status == 415:
            assert "application/json" in body["error"]["message"]
            assert body["error"]["code"] == "unsupported_media_type"


async def test_curl_without_a_header_is_told_which_one(serving, engine: ScriptedEngine) -> None:
    async with serving(engine) as session:
        _, body = await post(session, GOOD, {"Content-Type": "application/x-www-form-urlencoded"})
        assert "-H 'Content-Type: application/json'" in body["error"]["message"]


async def test_a_body_without_content_type_is_taken_for_json(serving, engine: ScriptedEngine) -> None:
    async with (
        serving(engine) as session,
        session.post("/generate", data=GOOD, skip_auto_headers=["Content-Type"]) as response,
    ):
        assert response.status == 200


async def test_a_body_of_10_mb_is_refused_and_the_connection_survives_it(serving, engine: ScriptedEngine) -> None:
    async with serving(engine) as session:
        status, body = await post(session, b'{"prompt": "' + b"x" * 10_000_000 + b'"}')
        assert (status, body["error"]["code"]) == (413, "request_too_large")
        assert (await post(session, GOOD))[0] == 200
        assert len(engine.drafts) == 1


async def test_a_small_body_cannot_unpack_into_a_big_one(serving, engine: ScriptedEngine) -> None:
    bomb = gzip.compress(b'{"prompt": "' + b"x" * 50_000_000 + b'"}')
    async with serving(engine) as session:
        status, body = await post(session, bomb, {**JSON, "Content-Encoding": "gzip"})
        assert (status, body["error"]["code"]) == (413, "request_too_large")


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
async def test_a_body_that_does_not_unpack_is_the_clients_fault(
    serving, engine: ScriptedEngine, encoding: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(engine) as session:
        status, body = await post(session, GOOD, {**JSON, "Content-Encoding": encoding})
        assert (status, body["error"]["code"]) == (400, "invalid_body")
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


async def test_bytes_that_are_no_http_are_one_short_line_in_the_log(
    serving, engine: ScriptedEngine, caplog: pytest.LogCaptureFixture
) -> None:
    """aiohttp logs them at length, as errors: anybody could fill the disk."""
    caplog.set_level(logging.INFO, logger="ksana")
    async with serving(engine) as session:
        url = session._base_url
        assert url is not None
        for data in (
            b"GET /\xff" + b"g" * 8000 + b" HTTP/1.1\r\n\r\n",
            b"GET / HTTP/1.1\r\nHost: x\r\nX: " + b"a" * 100_000 + b"\r\n\r\n",
        ):
            reader, writer = await asyncio.open_connection(url.host, url.port)
            writer.write(data)
            assert b" 400 Bad Request" in await reader.read()
            writer.close()
    [first, second] = [record for record in caplog.records if record.name == "ksana.http"]
    for record in (first, second):
        assert record.levelno == logging.INFO
        assert record.exc_info is None
        assert len(record.getMessage()) < 100
        assert "aaa" not in record.getMessage()
        assert "ggg" not in record.getMessage()


async def test_unknown_route_and_method(serving, engine: ScriptedEngine) -> None:
    async with serving(engine) as session:
        async with session.get("/nowhere") as response:
            error = (await response.json())["error"]
            assert (response.status, error["code"]) == (404, "not_found")
            assert "GET /nowhere" in error["message"]
        async with session.get("/generate") as response:
            assert (response.status, response.headers["Allow"]) == (405, "POST")
            assert (await response.json())["error"]["code"] == "method_not_allowed"


async def test_an_unexpected_exception_is_told_in_general_words_and_logged_in_full(
    serving, engine: ScriptedEngine, caplog: pytest.LogCaptureFixture
) -> None:
    async def broken(request: web.Request) -> web.Response:
        raise ValueError("the secret detail")

    async with serving(engine, routes(broken=broken)) as session:
        async with session.get("/broken", headers={"X-Request-Id": "abc-1"}) as response:
            text = await response.text()
            error = json.loads(text)["error"]
        assert (response.status, error["type"]) == (500, "server_error")
        assert "secret" not in text
        assert "abc-1" in error["message"]
        logged = [record for record in caplog.records if record.exc_info and "abc-1" in record.getMessage()]
        assert len(logged) == 1


async def test_redirects_of_plugins_pass(serving, engine: ScriptedEngine) -> None:
    async def moved(request: web.Request) -> web.Response:
        raise web.HTTPFound("/health")

    async with (
        serving(engine, routes(moved=moved)) as session,
        session.get("/moved", allow_redirects=False) as response,
    ):
        assert response.status == 302


async def test_a_dead_engine_is_503(serving, engine: ScriptedEngine) -> None:
    async with serving(engine) as session:
        engine.is_alive = False
        status, body = await post(session, GOOD)
        assert (status, body["error"]["code"]) == (503, "engine_dead")


async def test_sane_request_ids_are_echoed_and_others_replaced(serving, engine: ScriptedEngine) -> None:
    async with serving(engine) as session:
        for given, kept in [("abc-1", True), ("x" * 128, True), ("x" * 129, False), ("a b", False), ("é", False)]:
            async with session.get("/health", headers={"X-Request-Id": given}) as response:
                assert (response.headers["X-Request-Id"] == given) is kept
                assert response.headers["X-Request-Id"]
        async with session.get("/nowhere", headers={"X-Request-Id": "abc-1"}) as response:
            assert response.headers["X-Request-Id"] == "abc-1"


async def test_the_access_log_has_one_line_a_request_and_no_secrets(
    serving, engine: ScriptedEngine, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="ksana.access")
    async with serving(engine) as session:
        headers = {**JSON, "Authorization": "Bearer sk-secret", "X-Request-Id": "abc-1"}
        await post(session, GOOD, headers)
        async with session.get("/x%0Aforged?api_key=sk-secret"):
            pass
    lines = [record.getMessage() for record in caplog.records if record.name == "ksana.access"]
    assert len(lines) == 2
    assert lines[0].startswith("POST /generate 200 ")
    assert lines[0].endswith(" abc-1")
    assert lines[1].startswith("GET /x%0Aforged 404 ")
    assert not any("secret" in line or "\n" in line for line in lines)


async def test_the_access_log_can_be_switched_off(
    serving, engine: ScriptedEngine, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="ksana.access")
    async with serving(engine, access_log=False) as session:
        await post(session, GOOD)
    assert not [record for record in caplog.records if record.name == "ksana.access"]


async def test_plugin_middlewares_run_inside_the_servers_own(serving, engine: ScriptedEngine) -> None:
    @web.middleware
    async def refuse(request: web.Request, handler: Any) -> web.StreamResponse:
        raise web.HTTPUnauthorized(text="no key")

    @hookimpl
    def ksana_middlewares(register: Any, config: Any) -> None:
        register(refuse)

    async with serving(engine, SimpleNamespace(ksana_middlewares=ksana_middlewares)) as session:
        status, body = await post(session, GOOD)
        assert (status, body["error"]["message"]) == (401, "no key")


async def hello(request: web.Request) -> web.Response:
    return web.Response()


@pytest.mark.parametrize("paths", [["hello", "hello"], ["hello", "other", "hello"], ["health"], ["v/{a}", "v/{b}"]])
async def test_two_plugins_that_want_one_route_stop_the_start(engine: ScriptedEngine, paths: list[str]) -> None:
    manager = KsanaPluginManager()
    for number, path in enumerate(paths):
        manager.register(routes(**{path: hello}), f"plugin{number}")
    with pytest.raises(UsageError, match="/" + paths[-1].split("{")[0]):
        create_app(engine, KsanaConfig(), manager)
