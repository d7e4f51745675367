"""Every error that Ksana raises on purpose.

Two families matter to callers: a :class:`UsageError` is the operator's to mend (a wrong flag, a broken file, a plugin
that does not import) and ends a command with one line and exit code 2; a :class:`RequestError` is the client's to mend
and becomes an HTTP answer of the given status. Anything else that escapes is a bug of ours.
"""

from __future__ import annotations


class KsanaError(Exception):
    """Root of all deliberate errors."""


class UsageError(KsanaError):
    """The operator asked for something that cannot be done; the message says what, where and what to do."""


class ConfigError(UsageError):
    """A configuration key or value is wrong."""


class PluginLoadError(UsageError):
    """An installed or named plugin cannot be used: it does not import, or speaks another API number."""


class ModelLoadError(UsageError):
    """A model folder or weight file is missing, damaged or of an unsupported kind."""


class EngineDeadError(KsanaError):
    """The engine loop has stopped for good; no request can be served any more."""


class KsanaCode:
    """Numeric status codes of the original engine, sent beside the HTTP status by the native API."""

    INVALID_ARGUMENT = 2000
    LENGTH_EXCEEDED = 2002
    QUEUE_FULL = 2003
    ABORTED = 2004
    TIMEOUT = 3004
    RUNTIME_FAILED = 3010


class RequestError(KsanaError):
    """A request is refused, or has failed, in a way that its client should hear about.

    Args:
        message: what is wrong, in words the client can act on.
        status: HTTP status, 4xx for the client's faults, 5xx for ours.
        type: the ``type`` field of an OpenAI error body.
        code: the machine-readable ``code`` field, for example ``context_length_exceeded``.
        param: the request field at fault, for example ``temperature``.
        ksana_code: one of :class:`KsanaCode`.
        retry_after_s: seconds after which a client may try again, where that is known better than by the status.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        type: str = "invalid_request_error",
        code: str | None = None,
        param: str | None = None,
        ksana_code: int = KsanaCode.INVALID_ARGUMENT,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.type = type
        self.code = code
        self.param = param
        self.ksana_code = ksana_code
        self.retry_after_s = retry_after_s
