"""HTTPS: a context out of the operator's files."""

from __future__ import annotations

import ssl
from pathlib import Path

from ksana.errors import UsageError
from ksana.types.config import ServerConfig


def create_ssl_context(config: ServerConfig) -> ssl.SSLContext | None:
    """The context of a server with TLS 1.2 or newer, or None if the configuration asks for plain HTTP.

    Raises:
        UsageError: a file is missing, or holds something else than it should; the message names it.
    """
    if not config.ssl_certfile:
        for flag, value in (("--ssl-keyfile", config.ssl_keyfile), ("--ssl-ca-certs", config.ssl_ca_certs)):
            if value:
                raise UsageError(f"{flag} means nothing without --ssl-certfile, the server's certificate")
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    _load_certificate(context, config)
    if config.ssl_ca_certs:
        _load_authorities(context, config.ssl_ca_certs)
    context.set_alpn_protocols(["http/1.1"])
    return context


def _load_certificate(context: ssl.SSLContext, config: ServerConfig) -> None:
    certificate, key = config.ssl_certfile, config.ssl_keyfile or config.ssl_certfile
    if b"-----BEGIN CERTIFICATE" not in _read("--ssl-certfile", certificate):
        raise UsageError(f"--ssl-certfile {certificate} holds no certificate in PEM")
    if b"PRIVATE KEY-----" not in _read("--ssl-keyfile", key):
        raise UsageError(f"{key} holds no private key in PEM; give its file with --ssl-keyfile")
    password = _Password(config.ssl_keyfile_password_file)
    try:
        context.load_cert_chain(certificate, key, password)
    except ssl.SSLError as error:
        raise UsageError(_describe(error, certificate, key, password)) from None


def _load_authorities(context: ssl.SSLContext, file: str) -> None:
    authorities = _read("--ssl-ca-certs", file).decode("ascii", errors="replace")
    try:
        context.load_verify_locations(cadata=authorities)
    except ssl.SSLError:
        raise UsageError(f"--ssl-ca-certs {file} holds no certificates in PEM") from None
    context.verify_mode = ssl.CERT_REQUIRED


class _Password:
    """Called by OpenSSL if the key is encrypted; without it, OpenSSL would ask the terminal."""

    def __init__(self, file: str) -> None:
        self._password = _read("--ssl-keyfile-password-file", file).partition(b"\n")[0].rstrip(b"\r") if file else b""
        self.given = bool(file)
        self.asked = False

    def __call__(self) -> bytes:
        self.asked = True
        return self._password


def _read(flag: str, file: str) -> bytes:
    try:
        return Path(file).read_bytes()
    except OSError as error:
        raise UsageError(f"cannot read {flag} {file}: {error.strerror}") from None


def _describe(error: ssl.SSLError, certificate: str, key: str, password: _Password) -> str:
    if password.asked and not password.given:
        return f"the private key in {key} is encrypted; give its password with --ssl-keyfile-password-file"
    if password.asked:
        return f"the password in --ssl-keyfile-password-file does not decrypt the private key in {key}"
    if error.reason == "KEY_VALUES_MISMATCH":
        return f"the private key in {key} is not the one of the certificate in {certificate}"
    return f"the certificate in {certificate} or the private key in {key} is damaged ({error.reason or 'not PEM'})"
