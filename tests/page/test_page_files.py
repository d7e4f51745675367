"""The page's files as HTTP serves them."""

from __future__ import annotations

import re
import urllib.error
import urllib.request
from email.message import Message

import pytest
from pydantic import SecretStr

from ksana.builtins import page
from ksana.server.page_routes import FOLDER
from ksana.testing.live_server import live_server
from ksana.testing.scripted_engine import ScriptedEngine
from ksana.types.config import KsanaConfig, ServerConfig


def get(url: str, **headers: str) -> tuple[int, bytes, Message]:
    request = urllib.request.Request(url, headers={name.replace("_", "-"): text for name, text in headers.items()})
    try:
        with urllib.request.urlopen(request) as response:
            return response.status, response.read(), response.headers
    except urllib.error.HTTPError as error:
        return error.code, error.read(), error.headers


def test_a_browser_that_has_a_file_is_told_so(engine: ScriptedEngine) -> None:
    with live_server(engine, page) as url:
        status, body, headers = get(url)
        assert (status, headers["Content-Type"]) == (200, "text/html; charset=utf-8")
        assert body == (FOLDER / "index.html").read_bytes()
        assert headers["Cache-Control"] == "no-cache"
        assert get(url, If_None_Match=headers["ETag"])[:2] == (304, b"")
        assert get(url, If_None_Match='"another"')[0] == 200


@pytest.mark.parametrize("name", ["none.js", "..%2fpage_routes.py", "%2e%2e%2fapp.py", "index.html%00"])
def test_no_other_file_of_the_server_is_served(engine: ScriptedEngine, name: str) -> None:
    with live_server(engine, page) as url:
        assert get(f"{url}/page/{name}")[0] == 404


def test_the_page_comes_without_a_key_and_the_figures_do_not(engine: ScriptedEngine) -> None:
    config = KsanaConfig(server=ServerConfig(api_keys=(SecretStr("open-sesame"),)))
    with live_server(engine, page, config=config) as url:
        assert [get(url + path)[0] for path in ("/", "/page/main.js", "/engine/stats", "/engine/stats/stream")] == [
            *(200, 200),
            *(401, 401),
        ]
        assert get(f"{url}/engine/stats", Authorization="Bearer open-sesame")[0] == 200


def test_the_page_asks_no_other_host_and_works_below_any_path() -> None:
    texts = {path.name: path.read_text() for path in FOLDER.iterdir()}
    namespace = "http://www.w3.org/2000/svg"
    assert [name for name, text in texts.items() if re.search(r"\w://", text.replace(namespace, ""))] == []
    loaded = re.findall(r'(?:src|href)="page/([^"]+)"', texts["index.html"])
    imported = [name for text in texts.values() for name in re.findall(r'from "\./([^"]+)"', text)]
    assert {*loaded, *imported} == texts.keys() - {"index.html"}
    assert re.findall(r'(?:src|href|from|request\()[="( ]+/', "".join(texts.values())) == []
