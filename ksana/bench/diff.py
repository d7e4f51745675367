"""Comparing answers with stored ones: how alike two texts are, and where they part."""

from __future__ import annotations

import csv
import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ksana.bench.options import DiffOptions
from ksana.bench.prompt_files import read_csv_column
from ksana.errors import UsageError

_WEIGHT = 1.2
"""Exponent by which ROUGE-W prefers words in a row to the same words scattered."""

_WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff]|\w+|[^\w\s]")
"""Chinese and Japanese write no spaces: there each character is a word."""

Integers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class TextDiff:
    """How two texts differ.

    Attributes:
        rouge_w: F1 of ROUGE-W over words, 1 for equal texts.
        levenshtein: 1 minus the edit distance in characters over the longer length.
        first_mismatch: index of the first character that differs; None if the texts are equal.
    """

    index: int
    expected: str
    actual: str
    rouge_w: float
    levenshtein: float
    first_mismatch: int | None

    def is_suspicious(self, options: DiffOptions) -> bool:
        """Whether the texts are too unlike, or part too early."""
        if self.first_mismatch is None:
            return False
        return self.rouge_w < options.rouge_threshold or self.first_mismatch < options.mismatch_threshold


def read_texts(path: Path, flag: str) -> list[str]:
    """The texts of a file that ``--output-csv`` wrote: one a row, without a header.

    Raises:
        UsageError: it cannot be read.
    """
    try:
        return read_csv_column(path)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UsageError(f"{flag}: cannot read {path}: {getattr(error, 'strerror', None) or error}") from None


def compare_texts(expected: Sequence[str], actual: Sequence[str | None], where: str) -> list[TextDiff]:
    """Compare in pairs; None in ``actual`` is an answer that never came, and left out.

    Raises:
        UsageError: there are more of the one than of the other.
    """
    if len(expected) != len(actual):
        raise UsageError(
            f"{where} has {len(expected)} answers, but there are {len(actual)} to compare; they must be of one workload"
        )
    return [
        compare(index, first, second)
        for index, (first, second) in enumerate(zip(expected, actual, strict=True))
        if second is not None
    ]


def compare(index: int, expected: str, actual: str) -> TextDiff:
    """Compare two texts."""
    if expected == actual:
        return TextDiff(index, expected, actual, 1.0, 1.0, None)
    pairs = enumerate(itertools.zip_longest(expected, actual))
    mismatch = next(position for position, (first, second) in pairs if first != second)
    return TextDiff(
        index, expected, actual, rouge_w(expected, actual), levenshtein_ratio(expected, actual), first_mismatch=mismatch
    )


def rouge_w(expected: str, actual: str) -> float:
    """F1 of the weighted longest common subsequence of words (Lin, 2004)."""
    first, second = _numbered(_WORD.findall(expected), _WORD.findall(actual))
    if not len(first) or not len(second):
        return float(len(first) == len(second))
    # A table of the best weight per pair of prefixes, kept row by row. A run of k words weighs k ** _WEIGHT, and
    # `run` has the length of the run that ends at each cell.
    best = np.zeros(len(second) + 1)
    run = np.zeros(len(second) + 1)
    for word in first:
        run[1:] = np.where(second == word, run[:-1] + 1, 0)
        gain = run[1:] ** _WEIGHT - np.maximum(run[1:] - 1, 0) ** _WEIGHT
        best[1:] = np.maximum.accumulate(np.where(run[1:] > 0, np.maximum(best[:-1] + gain, best[1:]), best[1:]))
    weight = float(best[-1]) ** (1 / _WEIGHT)
    recall, precision = weight / len(first), weight / len(second)
    return 2 * recall * precision / (recall + precision) if weight else 0.0


def levenshtein_ratio(expected: str, actual: str) -> float:
    """1 minus the edit distance over the longer length."""
    first, second = _numbered(list(expected), list(actual))
    columns = np.arange(len(second) + 1)
    row = columns.copy()
    for number, character in enumerate(first, 1):
        following = np.empty_like(row)
        following[0] = number
        following[1:] = np.minimum(row[1:] + 1, row[:-1] + (second != character))
        # Insertions depend on the cell to the left: the least of all cells before, plus the way from there.
        row = np.minimum.accumulate(following - columns) + columns
    return 1 - int(row[-1]) / max(len(first), len(second), 1)


def _numbered(first: Sequence[str], second: Sequence[str]) -> tuple[Integers, Integers]:
    numbers = {symbol: number for number, symbol in enumerate(dict.fromkeys([*first, *second]))}
    return (
        np.array([numbers[symbol] for symbol in first], np.int64),
        np.array([numbers[symbol] for symbol in second], np.int64),
    )


def render_diff(diffs: Sequence[TextDiff], options: DiffOptions) -> str:
    """The result in words: averages, then every suspicious pair in full."""
    equal = sum(diff.first_mismatch is None for diff in diffs)
    suspicious = [diff for diff in diffs if diff.is_suspicious(options)]
    lines = [f"{equal} of {len(diffs)} answers equal, {len(suspicious)} suspicious"]
    if diffs:
        mismatches = [diff.first_mismatch for diff in diffs if diff.first_mismatch is not None]
        lines.append(
            f"mean ROUGE-W F1 {np.mean([diff.rouge_w for diff in diffs]):.4f}, "
            f"mean Levenshtein ratio {np.mean([diff.levenshtein for diff in diffs]):.4f}"
            + (f", mean first mismatch at character {np.mean(mismatches):.1f}" if mismatches else "")
        )
    for diff in suspicious:
        figures = f"ROUGE-W F1 {diff.rouge_w:.4f}, Levenshtein ratio {diff.levenshtein:.4f}"
        lines.append(f"\nanswer {diff.index}: {figures}, first mismatch at character {diff.first_mismatch}")
        lines.append(f"  expected: {diff.expected!r}\n  actual:   {diff.actual!r}")
    return "\n".join(lines)
