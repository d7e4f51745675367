"""Keys and certificates on a whole server, with the clients that people use."""

from __future__ import annotations

import ssl
from pathlib import Path
from types import SimpleNamespace

import httpx2 as httpx
import openai
import pytest
import trustme

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    folder = tmp_path_factory.mktemp("certificates")
    authority = trustme.CA()
    authority.cert_pem.write_to_path(folder / "authority.pem")
    authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(folder / "server.pem")
    return SimpleNamespace(authority=str(folder / "authority.pem"), server=str(folder / "server.pem"))


def test_the_openai_client_talks_to_a_server_with_a_key_and_a_certificate(start, files: SimpleNamespace) -> None:
    server = start("--port", "0", "-p", "openai_api", "--ssl-certfile", files.server, KSANA_API_KEY="hush-hush")
    url = server.url
    assert url.startswith("https://")
    with httpx.Client(verify=ssl.create_default_context(cafile=files.authority)) as http:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="hush-hush", http_client=http, max_retries=0)
        chunks = list(client.completions.create(model="ksana-llm", prompt="Hello", max_tokens=4, stream=True))
        assert chunks[-1].choices[0].finish_reason == "length"
        with pytest.raises(openai.AuthenticationError) as caught:
            client.with_options(api_key="wrong").models.list()
        assert caught.value.code == "invalid_api_key"
    # Whoever speaks HTTP to the port, or gives up in the handshake, is no error of ours.
    with pytest.raises(httpx.HTTPError):
        httpx.get(url.replace("https://", "http://"))
    with pytest.raises(httpx.ConnectError):
        httpx.get(url)
    assert "Traceback" not in server.output
    assert "hush" not in server.output
    assert '-H "Authorization: Bearer $KSANA_API_KEY"' in server.output


@pytest.mark.parametrize(
    ("flag", "message"),
    [("--ssl-certfile", "cannot read --ssl-certfile"), ("--api-key-file", "cannot read --api-key-file")],
)
def test_a_missing_file_ends_the_start_before_a_model_is_loaded(start, tmp_path: Path, flag: str, message: str) -> None:
    server = start("--port", "0", flag, str(tmp_path / "missing"))
    assert server.end() == 2
    assert message in server.output
    assert "Loading model" not in server.output


@pytest.mark.parametrize(
    ("host", "key", "warned"), [("0.0.0.0", "", True), ("0.0.0.0", "key", False), ("127.0.0.1", "", False)]
)
def test_an_open_server_that_others_can_reach_is_warned_of(start, host: str, key: str, warned: bool) -> None:
    server = start("--port", "0", "--host", host, KSANA_API_KEY=key)
    assert server.url
    server.process.terminate()
    assert server.end() == 0
    assert ("Whoever reaches this port may use the server" in server.output) is warned
