"""API keys, authentication by plugins, and what stays open."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import aiohttp
import pytest
from aiohttp import web

from ksana import hookimpl
from ksana.errors import RequestError, UsageError
from ksana.server.auth import ApiKeys, identity_of, public
from ksana.testing.scripted_engine import ScriptedEngine
from ksana.types.config import ServerConfig
from ksana.types.identity import Identity

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(20)]

GENERATE = {"prompt": "hi", "stream": False}
KEYS = ("first-key", "second-key")


async def who(request: web.Request) -> web.Response:
    return web.json_response({"name": identity_of(request).name})


@public
async def leaflet(request: web.Request) -> web.Response:
    return web.Response(text="<p>", content_type="text/html")


@hookimpl
def ksana_register_routes(app: web.Application) -> None:
    app.router.add_get("/who", who)
    app.router.add_get("/leaflet", leaflet)
    app.router.add_get("/metrics", who)


async def status(session: aiohttp.ClientSession, path: str, **headers: str) -> int:
    async with session.get(path, headers=headers) as response:
        return response.status


@pytest.mark.parametrize(
    ("headers", "name"),
    [
        ({"Authorization": "Bearer first-key"}, "api-key-1"),
        ({"authorization": "bearer  second-key "}, "api-key-2"),
        ({"X-Api-Key": "second-key"}, "api-key-2"),
        # What a proxy put there is no reason not to look at the other header.
        ({"Authorization": "Basic dTpw", "X-Api-Key": "first-key"}, "api-key-1"),
        ({"Authorization": "Bearer of-the-proxy", "X-Api-Key": "first-key"}, "api-key-1"),
    ],
)
async def test_each_key_opens_and_names_its_client(
    serving, engine: ScriptedEngine, plugin_of, headers: dict[str, str], name: str
) -> None:
    async with (
        serving(engine, plugin_of(ksana_register_routes), api_keys=KEYS) as session,
        session.get("/who", headers=headers) as response,
    ):
        assert (response.status, await response.json()) == (200, {"name": name})


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": ""},
        {"Authorization": "Bearer"},
        {"Authorization": "Bearer "},
        {"Authorization": "Bearer first-ke"},
        {"Authorization": "Bearer first-key2"},
        {"Authorization": "first-key"},
        {"Authorization": "Basic first-key"},
        {"X-Api-Key": ""},
        {"X-Api-Key": "first-key,second-key"},
        {"X-Api-Key": "schlüssel"},
    ],
)
async def test_whoever_has_no_key_is_refused(serving, engine: ScriptedEngine, headers: dict[str, str]) -> None:
    async with (
        serving(engine, api_keys=KEYS) as session,
        session.post("/generate", json=GENERATE, headers=headers) as response,
    ):
        error = (await response.json())["error"]
        assert (response.status, error["type"], error["code"]) == (401, "invalid_request_error", "invalid_api_key")
        assert response.headers["WWW-Authenticate"].startswith("Bearer ")
        assert "X-Request-Id" in response.headers
    assert engine.drafts == []


async def test_nothing_is_told_to_strangers_unless_it_was_asked_for(serving, engine: ScriptedEngine, plugin_of) -> None:
    paths = ("/health", "/ready", "/metrics", "/openapi.json", "/who", "/no-such-route", "/leaflet")
    async with serving(engine, plugin_of(ksana_register_routes), api_keys=KEYS) as session:
        assert [await status(session, path) for path in paths] == [401] * 6 + [200]
        assert [await status(session, path, **{"X-Api-Key": KEYS[0]}) for path in paths] == [200] * 5 + [404, 200]
    async with serving(engine, plugin_of(ksana_register_routes), api_keys=KEYS, public_health=True) as session:
        assert [await status(session, path) for path in paths] == [200, 200, 401, 401, 401, 401, 200]
    async with serving(engine, plugin_of(ksana_register_routes), api_keys=KEYS, public_metrics=True) as session:
        assert [await status(session, path) for path in paths] == [401, 401, 200, 401, 401, 401, 200]


async def test_a_server_without_keys_is_open(serving, engine: ScriptedEngine, plugin_of) -> None:
    async with (
        serving(engine, plugin_of(ksana_register_routes)) as session,
        session.get("/who", headers={"Authorization": "Bearer none"}) as response,
    ):
        assert (response.status, await response.json()) == (200, {"name": "anonymous"})


def refusal_of(user: str) -> Callable[[web.Request], None]:
    @hookimpl
    def ksana_authenticate(request: web.Request) -> None:
        if request.headers.get("X-User") == user:
            raise RequestError("not you", status=403, code="banned")

    return ksana_authenticate


async def test_plugins_are_asked_in_turn_before_the_keys(serving, engine: ScriptedEngine, plugin_of) -> None:
    @hookimpl
    async def ksana_authenticate(request: web.Request) -> Identity | None:
        return Identity("alice") if request.headers.get("X-User") == "alice" else None

    plugins = (plugin_of(ksana_register_routes, ksana_authenticate), plugin_of(refusal_of("mallory")))
    async with serving(engine, *plugins, api_keys=KEYS) as session:
        async with session.get("/who", headers={"X-User": "alice"}) as response:
            assert await response.json() == {"name": "alice"}
        async with session.get("/who", headers={"X-Api-Key": KEYS[1]}) as response:
            assert await response.json() == {"name": "api-key-2"}
        assert await status(session, "/who", **{"X-User": "mallory", "X-Api-Key": KEYS[0]}) == 403
        assert await status(session, "/who") == 401


async def test_a_plugin_that_fails_or_knows_nobody_lets_nobody_in(serving, engine: ScriptedEngine, plugin_of) -> None:
    @hookimpl
    def ksana_authenticate(request: web.Request) -> None:
        if "X-Break" in request.headers:
            raise ZeroDivisionError

    async with serving(engine, plugin_of(ksana_register_routes, ksana_authenticate)) as session:
        assert await status(session, "/who") == 401
        assert await status(session, "/who", **{"X-Break": "1"}) == 500


async def test_keys_are_in_no_log(serving, engine: ScriptedEngine, plugin_of, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    async with serving(engine, plugin_of(ksana_register_routes), api_keys=KEYS) as session:
        await status(session, f"/who?key={KEYS[0]}", **{"X-Api-Key": KEYS[0]})
        await status(session, "/who", Authorization="Bearer almost-first-key")
    assert caplog.messages
    assert "first-key" not in caplog.text


def test_a_file_holds_one_key_a_line(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# the team's\nalpha \n\n  # not this\nbeta\n")
    keys = ApiKeys.of(ServerConfig(api_key_file=str(file)))

    def identify(key: str) -> Identity | None:
        return keys.identify(SimpleNamespace(headers={"X-Api-Key": key}))  # type: ignore[arg-type]

    assert [identify(key) for key in ("alpha", "beta", "", "# not this")] == [
        Identity("api-key-1"),
        Identity("api-key-2"),
        None,
        None,
    ]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("# nothing\n\n", "holds no key"),
        ("good\nba d-secret\n", "line 2 is empty or holds a space"),
        ("schlüssel-secret\n", "line 1 .* beyond ASCII"),
        (None, "cannot read --api-key-file"),
    ],
)
def test_a_wrong_file_of_keys_is_named_and_not_shown(tmp_path: Path, content: str | None, message: str) -> None:
    file = tmp_path / "keys"
    if content is not None:
        file.write_text(content)
    with pytest.raises(UsageError, match=message) as caught:
        ApiKeys.of(ServerConfig(api_key_file=str(file)))
    assert str(file) in str(caught.value)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("key", ["", "two words", "ключ"])
def test_a_key_that_no_client_could_send_is_refused(key: str) -> None:
    # An empty one above all: it would be a key that everybody has.
    with pytest.raises(UsageError, match="API key 1"):
        ApiKeys.of(ServerConfig(api_keys=(key,)))  # type: ignore[arg-type]
