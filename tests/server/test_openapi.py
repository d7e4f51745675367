"""The OpenAPI document says what the routes are."""

from __future__ import annotations

from typing import Any

import pytest
from aiohttp import web
from pydantic import BaseModel

from ksana import hookimpl
from ksana.server.operations import describes
from ksana.testing.scripted_engine import ScriptedEngine

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(20)]


class Wish(BaseModel):
    amount: int
    next: Wish | None = None


class Gift(BaseModel):
    name: str


class Genie:
    @describes("Grant a wish", request=Wish, response=list[Gift], stream="text/event-stream")
    async def grant(self, request: web.Request) -> web.Response:
        return web.Response()

    async def undescribed(self, request: web.Request) -> web.Response:
        return web.Response()


@hookimpl
def ksana_register_routes(app: web.Application) -> None:
    app.router.add_post("/lamps/{lamp:.+}/wishes", Genie().grant)
    app.router.add_get("/lamps", Genie().undescribed)


async def document(session: Any, **headers: str) -> dict[str, Any]:
    async with session.get("/openapi.json", headers=headers) as response:
        assert response.status == 200
        found: dict[str, Any] = await response.json()
        return found


async def test_a_described_route_has_the_schemas_of_its_models(serving, engine: ScriptedEngine, plugin_of) -> None:
    async with serving(engine, plugin_of(ksana_register_routes)) as session:
        described = await document(session)
    operation = described["paths"]["/lamps/{lamp}/wishes"]["post"]
    schemas = described["components"]["schemas"]
    assert operation["summary"] == "Grant a wish"
    assert operation["requestBody"]["content"]["application/json"]["schema"] == {"$ref": "#/components/schemas/Wish"}
    assert schemas["Wish"]["required"] == ["amount"]
    content = operation["responses"]["200"]["content"]
    assert content["application/json"]["schema"]["items"] == {"$ref": "#/components/schemas/Gift"}
    assert "text/event-stream" in content
    assert [parameter["name"] for parameter in operation["parameters"]] == ["lamp"]
    assert "get" in described["paths"]["/lamps"]


async def test_every_route_is_there_once_and_refers_to_what_exists(serving, engine: ScriptedEngine, plugin_of) -> None:
    async with serving(engine, plugin_of(ksana_register_routes)) as session:
        described = await document(session)
    operations = [operation for path in described["paths"].values() for operation in path.values()]
    names = [operation["operationId"] for operation in operations]
    assert len(names) == len(set(names))
    assert {"/health", "/ready", "/generate", "/openapi.json"} <= described["paths"].keys()
    assert all("head" not in path for path in described["paths"].values())
    for reference in references(described):
        target: Any = described
        for step in reference.removeprefix("#/").split("/"):
            target = target[step]
    assert "security" not in described


async def test_the_need_for_a_key_is_documented(serving, engine: ScriptedEngine) -> None:
    async with serving(engine, api_keys=("key",)) as session:
        described = await document(session, **{"X-Api-Key": "key"})
    names = {name for scheme in described["security"] for name in scheme}
    assert names == described["components"]["securitySchemes"].keys()


def references(node: object) -> list[str]:
    if isinstance(node, dict):
        own = [node["$ref"]] if isinstance(node.get("$ref"), str) else []
        return own + [found for value in node.values() for found in references(value)]
    return [found for value in node for found in references(value)] if isinstance(node, list) else []
