"""Reading and writing JSON files that pydantic models describe, with errors that say where the mistake is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from ksana.cli.output_files import write_file
from ksana.errors import UsageError
from ksana.plugin.messages import nearest


class JsonPart(BaseModel):
    """Base of everything in these files: immutable, no unknown keys, no number where text belongs or the reverse."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=())


PartT = TypeVar("PartT", bound=JsonPart)


def read_json(path: Path, kind: type[PartT]) -> PartT:
    """Read and validate a file.

    Raises:
        UsageError: it cannot be read, is not JSON, holds a key twice, or does not fit ``kind``; the message names the
            file, the place in it, and what is valid.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not UTF-8 text") from error
    try:
        json.loads(text, object_pairs_hook=_unique_keys)
    except json.JSONDecodeError as error:
        raise UsageError(f"{path} is not valid JSON: {error.msg}, line {error.lineno}, column {error.colno}") from error
    except ValueError as error:
        raise UsageError(f"{path}: {error}") from error
    except RecursionError as error:
        raise UsageError(f"{path} is nested too deeply") from error
    try:
        return kind.model_validate_json(text)
    except ValidationError as error:
        problems = error.errors(include_url=False, include_context=False)
        shown = "; ".join(_describe_problem(problem, kind) for problem in problems[:3])
        more = f"; and {len(problems) - 3} more" if len(problems) > 3 else ""
        raise UsageError(f"{path}: {shown}{more}") from error


def write_json(path: Path, part: JsonPart) -> None:
    """Write a file as a whole or not at all: it appears under its name when it is complete.

    Raises:
        UsageError: the folder or the file cannot be written.
    """
    write_file(path, lambda file: file.write_text(part.model_dump_json(indent=2) + "\n", encoding="utf-8"))


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"the key {twice!r} appears twice in one object")
    return found


def _describe_problem(problem: Any, kind: type[JsonPart]) -> str:
    place = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in problem["loc"]).lstrip(".")
    if problem["type"] == "extra_forbidden":
        return f"unknown key {place}{nearest(str(problem['loc'][-1]), _all_keys(kind))}"
    if problem["type"] == "missing":
        return f"{place} is missing"
    message = problem["msg"].removeprefix("Value error, ").replace("Input should be", "must be", 1)
    message = message[:1].lower() + message[1:]
    given = problem["input"]
    shown = "" if isinstance(given, (dict, list)) else f", not {json.dumps(given, default=str)[:60]}"
    return f"{place}: {message}{shown}" if place else f"{message}{shown}"


def _all_keys(kind: type[JsonPart]) -> set[str]:
    """Every key that the schema mentions anywhere: near enough for a hint."""
    schema = kind.model_json_schema()
    parts = [schema, *schema.get("$defs", {}).values()]
    return {key for part in parts for key in part.get("properties", {})}
