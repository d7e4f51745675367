"""What aiohttp logs below the handlers: noise of the network in one quiet line, faults of ours in full."""

from __future__ import annotations

import logging

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError


def protocol_logger() -> logging.Logger:
    """The logger for aiohttp's protocol code.

    Bytes that are no HTTP come from every port scanner, and from clients of our own that speak TLS to the wrong port.
    aiohttp logs them as errors with a traceback: whoever can reach the port could fill the log.
    """
    logger = logging.getLogger("ksana.http")
    if not any(isinstance(present, _ClientFaults) for present in logger.filters):
        logger.addFilter(_ClientFaults())
    return logger


class _ClientFaults(logging.Filter):
    """Turns records about malformed requests into one line of level INFO."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if not isinstance(error, (HttpProcessingError, web.RequestPayloadError)):
            return True
        record.levelno, record.levelname = logging.INFO, logging.getLevelName(logging.INFO)
        # Up to the colon: behind it stand the client's bytes, which may be a prompt or a key.
        reason = str(getattr(error.__cause__ or error, "message", error)).partition(":")[0]
        record.msg, record.args, record.exc_info = "Malformed request: %s", (" ".join(reason.split()),), None
        return logging.getLogger(record.name).isEnabledFor(logging.INFO)
