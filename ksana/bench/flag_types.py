"""How the words of a command line become values. All raise ``ArgumentTypeError`` for what they cannot read."""

from __future__ import annotations

import math
from argparse import ArgumentTypeError
from collections.abc import Callable
from typing import Any

from pydantic_core import from_json

from ksana.bench.options import LengthRange
from ksana.cli.flags import at_least


def number(*, positive: bool) -> Callable[[str], float]:
    """A number, ``inf`` included, that is not negative, and not 0 either if it must be ``positive``."""

    def parse(word: str) -> float:
        try:
            value = float(word)
        except ValueError:
            raise ArgumentTypeError(f"{word!r} is not a number") from None
        if math.isnan(value) or value < 0 or (positive and value == 0):
            raise ArgumentTypeError(f"{word} must be {'more than 0' if positive else 'at least 0'}")
        return value

    return parse


def length_range(word: str) -> LengthRange:
    """``128``, or ``64:256`` for lengths that are drawn from between."""
    low, colon, high = word.partition(":")
    bounds = LengthRange(at_least(1)(low), at_least(1)(high if colon else low))
    if bounds.low > bounds.high:
        raise ArgumentTypeError(f"{word}: the smaller number comes first")
    return bounds


def token_range(word: str) -> tuple[int, int]:
    """``1000:10000``: token ids, the second excluded."""
    low, _, high = word.partition(":")
    bounds = at_least(0)(low), at_least(1)(high)
    if bounds[0] >= bounds[1]:
        raise ArgumentTypeError(f"{word}: the smaller number comes first")
    return bounds


def percentiles(word: str) -> tuple[float, ...]:
    """``50,90,99``."""
    values = tuple(number(positive=False)(part) for part in word.split(","))
    if max(values) > 100:
        raise ArgumentTypeError(f"{word}: percentiles lie between 0 and 100")
    return values


def statistic(word: str) -> str:
    """``mean``, or a percentile like ``p99``."""
    if word != "mean":
        if not word.startswith("p"):
            raise ArgumentTypeError(f"{word!r} is neither 'mean' nor a percentile like 'p99'")
        percentiles(word[1:])
    return word


def column(word: str) -> int | str:
    """An index from 0, or a name."""
    return int(word) if word.isdigit() else word


def header(word: str) -> tuple[str, str]:
    """``Name: value``."""
    name, colon, value = word.partition(":")
    if not colon or not name.strip():
        raise ArgumentTypeError(f"{name!r} is not of the form 'Name: value'")
    return name.strip(), value.strip()


def json_object(word: str) -> dict[str, Any]:
    """An object as JSON."""
    try:
        value = from_json(word)
    except ValueError as error:
        raise ArgumentTypeError(f"not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ArgumentTypeError("must be a JSON object, such as '{\"seed\": 1}'")
    return value
