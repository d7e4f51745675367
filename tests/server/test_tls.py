"""HTTPS with a certificate made for the test, and every way in which the operator's files can be wrong."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace

import aiohttp
import pytest
import trustme
from aiohttp import web
from cryptography.hazmat.primitives import serialization

from ksana.errors import UsageError
from ksana.server.tls import create_ssl_context
from ksana.types.config import ServerConfig

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(20)]

PASSWORD = b"a secret"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """Paths of certificates and keys, right and wrong ones."""
    folder = tmp_path_factory.mktemp("certificates")
    authority, other = trustme.CA(), trustme.CA()
    server, stranger = authority.issue_cert("127.0.0.1"), other.issue_cert("127.0.0.1")
    key = serialization.load_pem_private_key(server.private_key_pem.bytes(), None)
    contents = {
        "authority": authority.cert_pem.bytes(),
        "both": server.private_key_and_cert_chain_pem.bytes(),
        "certificate": b"".join(blob.bytes() for blob in server.cert_chain_pems),
        "key": server.private_key_pem.bytes(),
        "other_key": stranger.private_key_pem.bytes(),
        "encrypted_key": key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(PASSWORD),
        ),
        "password": PASSWORD + b"\nnot this\n",
        "wrong_password": b"another\n",
        "client": authority.issue_cert("client@example.com").private_key_and_cert_chain_pem.bytes(),
        "stranger": stranger.private_key_and_cert_chain_pem.bytes(),
        "damaged": b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n",
        "text": b"hello\n",
    }
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    return SimpleNamespace(missing=str(folder / "missing"), **{name: str(folder / name) for name in contents})


@asynccontextmanager
async def secure_server(**options: str) -> AsyncIterator[str]:
    async def hello(request: web.Request) -> web.Response:
        return web.Response(text="hello")

    app = web.Application()
    app.router.add_get("/", hello)
    runner = web.AppRunner(app)
    await runner.setup()
    context = create_ssl_context(ServerConfig.model_validate(options))
    await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context).start()
    try:
        yield f"https://127.0.0.1:{runner.addresses[0][1]}/"
    finally:
        await runner.cleanup()


async def fetch(url: str, authority: str, client: str = "") -> str:
    trust = ssl.create_default_context(cafile=authority)
    if client:
        trust.load_cert_chain(client)
    async with aiohttp.ClientSession() as session, session.get(url, ssl=trust) as response:
        return await response.text()


@pytest.mark.parametrize(
    "options",
    [
        {"ssl_certfile": "both"},
        {"ssl_certfile": "certificate", "ssl_keyfile": "key"},
        {"ssl_certfile": "certificate", "ssl_keyfile": "encrypted_key", "ssl_keyfile_password_file": "password"},
    ],
)
async def test_a_client_that_trusts_the_authority_is_served(files: SimpleNamespace, options: dict[str, str]) -> None:
    async with secure_server(**{name: getattr(files, file) for name, file in options.items()}) as url:
        assert await fetch(url, files.authority) == "hello"
        with pytest.raises(aiohttp.ClientConnectorCertificateError):
            await fetch(url, files.stranger)


async def test_clients_must_show_a_certificate_if_authorities_are_named(files: SimpleNamespace) -> None:
    async with secure_server(ssl_certfile=files.both, ssl_ca_certs=files.authority) as url:
        assert await fetch(url, files.authority, files.client) == "hello"
        for client in ("", files.stranger):
            with pytest.raises((aiohttp.ClientError, asyncio.TimeoutError)):
                await fetch(url, files.authority, client)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ssl_keyfile": "key"}, "--ssl-keyfile means nothing without --ssl-certfile"),
        ({"ssl_ca_certs": "authority"}, "--ssl-ca-certs means nothing without --ssl-certfile"),
        ({"ssl_certfile": "missing"}, "cannot read --ssl-certfile .*missing: No such file"),
        ({"ssl_certfile": "text"}, "text holds no certificate"),
        ({"ssl_certfile": "certificate"}, "holds no private key in PEM; give its file with --ssl-keyfile"),
        ({"ssl_certfile": "certificate", "ssl_keyfile": "missing"}, "cannot read --ssl-keyfile"),
        ({"ssl_certfile": "certificate", "ssl_keyfile": "other_key"}, "other_key is not the one of the certificate"),
        # Without an answer of ours OpenSSL would ask the terminal, and the start would hang.
        ({"ssl_certfile": "certificate", "ssl_keyfile": "encrypted_key"}, "give its password with"),
        (
            {
                "ssl_certfile": "certificate",
                "ssl_keyfile": "encrypted_key",
                "ssl_keyfile_password_file": "wrong_password",
            },
            "does not decrypt",
        ),
        ({"ssl_certfile": "damaged", "ssl_keyfile": "key"}, "is damaged"),
        ({"ssl_certfile": "both", "ssl_ca_certs": "text"}, "text holds no certificates"),
        ({"ssl_certfile": "both", "ssl_ca_certs": "missing"}, "cannot read --ssl-ca-certs"),
    ],
)
def test_a_wrong_file_is_named_in_one_line(files: SimpleNamespace, options: dict[str, str], message: str) -> None:
    config = ServerConfig.model_validate({name: getattr(files, file) for name, file in options.items()})
    with pytest.raises(UsageError, match=message) as caught:
        create_ssl_context(config)
    assert "\n" not in str(caught.value)


def test_old_versions_of_the_protocol_are_refused(files: SimpleNamespace) -> None:
    context = create_ssl_context(ServerConfig(ssl_certfile=files.both))
    assert context is not None
    assert context.minimum_version >= ssl.TLSVersion.TLSv1_2
