"""``logit_bias`` as it comes in JSON, whose keys are strings."""

from __future__ import annotations

from collections.abc import Mapping

from ksana.errors import RequestError

_MAX_DIGITS = 9


def parse_logit_bias(given: Mapping[str, float] | None) -> tuple[tuple[int, float], ...]:
    """Pairs of token id and bias. Raises RequestError for a key that is no token id."""
    pairs = []
    for key, bias in (given or {}).items():
        if not (key.isascii() and key.isdecimal()) or len(key) > _MAX_DIGITS:
            raise RequestError(f"logit_bias has the key {key[:20]!r}, which is no token id", param="logit_bias")
        pairs.append((int(key), bias))
    return tuple(pairs)
