"""Pages of other origins, and what browsers are told about every answer."""

from __future__ import annotations

import pytest
from aiohttp import web
from pydantic import ValidationError

from ksana import hookimpl
from ksana.testing.scripted_engine import ScriptedEngine
from ksana.types.config import ServerConfig

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(20)]

PAGE = "https://chat.example.com"
PREFLIGHT = {
    "Origin": PAGE,
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type",
}


def cors_headers(response: object) -> dict[str, str]:
    headers = response.headers  # type: ignore[attr-defined]
    return {name: value for name, value in headers.items() if name.startswith("Access-Control-")}


async def test_no_page_is_allowed_unless_it_is_named(serving, engine: ScriptedEngine) -> None:
    for origins in ((), ("https://other.example.com", "http://chat.example.com", f"{PAGE}:8443")):
        async with serving(engine, cors_origins=origins) as session:
            async with session.options("/generate", headers=PREFLIGHT) as response:
                assert (response.status, cors_headers(response)) == (405, {})
            async with session.get("/health", headers={"Origin": PAGE}) as response:
                assert (response.status, cors_headers(response)) == (200, {})
                assert response.headers.get("Vary") == ("Origin" if origins else None)


async def test_a_named_page_may_ask_answer_and_read_errors(serving, engine: ScriptedEngine) -> None:
    async with serving(engine, cors_origins=(PAGE,), api_keys=("key",)) as session:
        # Browsers send no key with the first question.
        async with session.options("/generate", headers=PREFLIGHT) as response:
            assert response.status == 204
            assert response.headers["Access-Control-Allow-Headers"] == "authorization,content-type"
            assert "POST" in response.headers["Access-Control-Allow-Methods"]
        for key, status in (("wrong", 401), ("key", 200)):
            headers = {"Origin": PAGE, "X-Api-Key": key}
            async with session.post("/generate", json={"prompt": "hi", "stream": True}, headers=headers) as response:
                assert response.status == status
                assert response.headers["Access-Control-Allow-Origin"] == PAGE
                assert "X-Request-Id" in response.headers["Access-Control-Expose-Headers"]
                assert "Access-Control-Allow-Credentials" not in response.headers
                assert response.headers["Vary"] == "Origin"


async def test_any_page_never_gets_credentials(serving, engine: ScriptedEngine) -> None:
    async with (
        serving(engine, cors_origins=("*",)) as session,
        session.get("/health", headers={"Origin": PAGE, "Cookie": "a=b"}) as response,
    ):
        assert response.headers["Access-Control-Allow-Origin"] == "*"
        assert "Access-Control-Allow-Credentials" not in response.headers


@pytest.mark.parametrize(
    "origin", ["example.com", "https://example.com/", "https://user@example.com", "null", "", "**"]
)
def test_what_is_no_origin_is_refused(origin: str) -> None:
    with pytest.raises(ValidationError, match=r"must be like https://example\.com"):
        ServerConfig(cors_origins=(origin,))


@pytest.mark.parametrize("origin", ["*", "http://localhost:3000", "https://[::1]:8443", "chrome-extension://abcdef"])
def test_what_is_an_origin_is_taken(origin: str) -> None:
    assert ServerConfig(cors_origins=(origin,)).cors_origins == (origin,)


async def test_html_of_a_plugin_is_locked_down_unless_it_says_otherwise(
    serving, engine: ScriptedEngine, plugin_of
) -> None:
    async def page(request: web.Request) -> web.Response:
        headers = {"Content-Security-Policy": "default-src *"} if "own" in request.query else None
        return web.Response(text="<p>hello", content_type="text/html", headers=headers)

    @hookimpl
    def ksana_register_routes(app: web.Application) -> None:
        app.router.add_get("/a-page", page)

    async with serving(engine, plugin_of(ksana_register_routes)) as session:
        async with session.get("/a-page") as response:
            assert "frame-ancestors 'none'" in response.headers["Content-Security-Policy"]
            assert response.headers["X-Frame-Options"] == "DENY"
        async with session.get("/a-page?own") as response:
            assert response.headers["Content-Security-Policy"] == "default-src *"
        async with session.get("/health") as response:
            assert response.headers["X-Content-Type-Options"] == "nosniff"
            assert "Content-Security-Policy" not in response.headers
