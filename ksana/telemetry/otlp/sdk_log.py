"""The log of OpenTelemetry's exporters, which would say several times a minute that a collector does not answer."""

from __future__ import annotations

import logging
from functools import cache

logger = logging.getLogger(__name__)

_EXPORTERS = "opentelemetry.exporter.otlp.proto.http"


class SdkLog(logging.Handler):
    """Turns what the exporters say into messages of level debug.

    Attributes:
        first: what they said first since this was last emptied: the cause, before the retries that came of it.
    """

    first = ""

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage()
        self.first = self.first or message
        logger.debug("%s", message)


@cache
def quiet_sdk_log() -> SdkLog:
    """Have the exporters log to the returned handler alone, in the whole process."""
    handler = SdkLog()
    exporters = logging.getLogger(_EXPORTERS)
    exporters.addHandler(handler)
    exporters.propagate = False
    return handler
