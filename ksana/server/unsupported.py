"""Parameters that exist elsewhere and have no meaning here yet are refused by name, never silently ignored."""

from __future__ import annotations

from collections.abc import Mapping

from ksana.errors import RequestError

NeutralValues = Mapping[str, tuple[object, ...]]
"""For every unsupported field the values that ask for nothing; null always is one."""


def refuse_unsupported(fields: Mapping[str, object], neutral: NeutralValues, *, prefix: str = "") -> None:
    """Raise :class:`RequestError` for the first field of ``fields`` that asks for what is not there.

    Args:
        fields: what the client sent.
        neutral: the unsupported fields.
        prefix: where in the body ``fields`` sit, for the error's ``param``.
    """
    for name, value in fields.items():
        if name not in neutral or value is None or value in neutral[name]:
            continue
        allowed = neutral[name]
        advice = f"leave it out or set it to {allowed[0]!r}" if allowed else "leave it out"
        raise RequestError(
            f"{prefix}{name} is not supported by this server; {advice}",
            code="unsupported_parameter",
            param=f"{prefix}{name}",
        )
