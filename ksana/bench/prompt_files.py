"""Prompts out of CSV and JSON-lines files."""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import from_json

from ksana.bench.workload import Prompt
from ksana.errors import UsageError

Line = TypeVar("Line", bound=BaseModel)

PromptLine = tuple[Prompt, int | None]
"""A prompt, and the most tokens to generate where the file says so."""


class JsonPrompt(BaseModel):
    """A line of a JSON-lines file: one of the three kinds of prompt. Further keys are ignored."""

    model_config = ConfigDict(strict=True)

    prompt: str | None = None
    input_tokens: list[int] | None = None
    messages: list[dict[str, Any]] | None = None
    max_tokens: int | None = Field(default=None, ge=1)

    @model_validator(mode="after")
    def _one_prompt(self) -> JsonPrompt:
        if sum(bool(value) for value in (self.prompt, self.input_tokens, self.messages)) != 1:
            raise ValueError("exactly one of prompt, input_tokens and messages must be there, and not empty")
        return self

    @property
    def value(self) -> Prompt:
        """The prompt that is there."""
        return self.prompt or self.input_tokens or self.messages or ""


def read_prompts(path: Path, column: int | str) -> list[PromptLine]:
    """Read prompts: from JSON lines if the name ends in ``.jsonl``, otherwise from a column of a CSV file.

    Args:
        column: index of the CSV column, or its name; with a name the first line is a header.

    Raises:
        UsageError: the file cannot be read, has no prompts, or has a line of another shape.
    """
    try:
        prompts = list(_read_jsonl(path) if path.suffix == ".jsonl" else _read_csv(path, column))
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--prompts: cannot read {path}: {getattr(error, 'strerror', None) or error}") from None
    if not prompts:
        raise UsageError(f"--prompts: {path} has no prompts")
    return prompts


def read_csv_column(path: Path) -> list[str]:
    """The first column of a CSV file without a header, empty fields included.

    Raises:
        OSError, UnicodeDecodeError, csv.Error: it cannot be read.
    """
    with path.open(newline="", encoding="utf-8") as file:
        return [row[0] if row else "" for row in _csv_rows(file)]


def _read_csv(path: Path, column: int | str) -> Iterator[PromptLine]:
    with path.open(newline="", encoding="utf-8") as file:
        rows = _csv_rows(file)
        index = column if isinstance(column, int) else _column_index(path, next(rows, []), column)
        try:
            for number, row in enumerate(rows, 1):
                if not row:
                    continue
                if index >= len(row) or not row[index]:
                    raise UsageError(f"--prompts: {path}, row {number} has nothing in column {column} (--col-idx)")
                yield row[index], None
        except csv.Error as error:
            raise UsageError(f"--prompts: {path} is not a CSV file: {error}") from None


def _csv_rows(file: Any) -> Iterator[list[str]]:
    csv.field_size_limit(min(sys.maxsize, 2**31 - 1))  # prompts are longer than the 128 KiB of the default
    return csv.reader(file)


def _column_index(path: Path, header: list[str], column: str) -> int:
    if column not in header:
        raise UsageError(f"--col-idx: {path} has no column {column!r}; it has {', '.join(header) or 'none'}")
    return header.index(column)


def _read_jsonl(path: Path) -> Iterator[PromptLine]:
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if line.strip():
            entry = parse_line(JsonPrompt, line, f"--prompts: {path}, line {number}")
            yield entry.value, entry.max_tokens


def parse_line(model: type[Line], line: str, where: str) -> Line:
    """Validate a line of JSON.

    Raises:
        UsageError: it is not JSON or not of this shape; the message starts with ``where``.
    """
    try:
        return model.model_validate(from_json(line))
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise UsageError(f"{where}: {place + ': ' if place else ''}{first['msg']}") from None
    except ValueError as error:
        raise UsageError(f"{where} is not JSON: {error}") from None
