"""Which library should constrain decoding? Measures llguidance and xgrammar on the same schemas and the same draws.

Usage: python benchmarks/grammar_libraries.py [--model demo] [--schemas 200]

Needs jsonschema and both libraries: ``pip install llguidance xgrammar jsonschema``. For each it tells the time to take
in the vocabulary, to compile a schema, and to fill a mask; how many schemas are refused; and what becomes of texts that
a very weak model (random logits, with a liking for what ends things) writes under the mask: how many end, how many of
those validate, how many are a different library's texts that this one would not let through.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import jsonschema
import numpy as np

from ksana import LLM
from ksana.testing.json_schemas import random_schema
from ksana.text.tokenizer import Tokenizer

_MAX_TOKENS = 400
_EXOTIC = [
    {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 3}, "uniqueItems": True, "minItems": 3},
    {"type": "object", "minProperties": 2, "additionalProperties": {"type": "boolean"}},
    {"type": "object", "maxProperties": 1, "additionalProperties": {"type": "boolean"}},
    {"type": "integer", "multipleOf": 7},
    {"type": "object", "patternProperties": {"^k[0-9]$": {"type": "null"}}, "additionalProperties": False},
    {"type": "string", "not": {"const": "a"}},
    {"type": "array", "contains": {"const": 1}, "items": {"type": "integer"}, "maxItems": 4},
    {"oneOf": [{"type": "integer"}, {"type": "number"}]},
    {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 9}]},
    {"type": "object", "properties": {"a": {"type": "integer"}, "b": {}}, "dependentRequired": {"a": ["b"]}},
    {"type": "object", "propertyNames": {"maxLength": 3}, "additionalProperties": {"type": "null"}},
    {"if": {"type": "integer"}, "then": {"minimum": 5}, "else": {"type": "string"}},
    {"type": "string", "pattern": "^(?=.*[0-9]).{4}$"},
    {"type": "string", "minLength": 20_000},
]
"""What the generator leaves out because libraries differ in it: to refuse is right, to disregard is not."""


class Matcher(Protocol):
    """One text under one grammar."""

    def fill(self, row: np.ndarray) -> None: ...

    def accept(self, token: int) -> bool: ...


Compile = Callable[[str], Callable[[], Matcher]]


class _Vocabulary:
    """What llguidance asks of a tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.tokens = _token_bytes(tokenizer)
        self.eos_token_id = tokenizer.eos_token_id
        self.bos_token_id = tokenizer.bos_token_id
        self.special_token_ids = sorted(tokenizer.special_token_ids)

    def __call__(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)


def _token_bytes(tokenizer: Tokenizer) -> list[bytes]:
    return [tokenizer.token_bytes(i) or b"" for i in range(tokenizer.vocab_size)]


def llguidance_compiler(tokenizer: Tokenizer, eos: int) -> Compile:
    from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

    vocabulary = LLTokenizer(TokenizerWrapper(_Vocabulary(tokenizer)), eos_token=eos)

    class Guidance:
        def __init__(self, matcher: LLMatcher) -> None:
            self._matcher = matcher

        def fill(self, row: np.ndarray) -> None:
            self._matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)

        def accept(self, token: int) -> bool:
            return bool(self._matcher.consume_token(token))

    def compile_schema(schema: str) -> Callable[[], Matcher]:
        grammar = LLMatcher.grammar_from_json_schema(schema, overrides={"whitespace_pattern": r" |\n[ \t]{0,20}"})
        compiled = LLMatcher(vocabulary, grammar, log_level=0)
        if compiled.is_error():
            raise ValueError(compiled.get_error())
        return lambda: Guidance(compiled.deep_copy())

    return compile_schema


def xgrammar_compiler(tokenizer: Tokenizer, eos: int) -> Compile:
    import torch
    import xgrammar

    info = xgrammar.TokenizerInfo(
        _token_bytes(tokenizer), xgrammar.VocabType.RAW, vocab_size=tokenizer.vocab_size, stop_token_ids=[eos]
    )
    compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)

    class XGrammar:
        def __init__(self, compiled: xgrammar.CompiledGrammar) -> None:
            self._matcher = xgrammar.GrammarMatcher(compiled)

        def fill(self, row: np.ndarray) -> None:
            self._matcher.fill_next_token_bitmask(torch.from_numpy(row)[None])

        def accept(self, token: int) -> bool:
            return bool(self._matcher.accept_token(token))

    def compile_schema(schema: str) -> Callable[[], Matcher]:
        compiled = compiler.compile_json_schema(schema, any_whitespace=True, max_whitespace_cnt=2)
        return lambda: XGrammar(compiled)

    return compile_schema


LIBRARIES: dict[str, Callable[[Tokenizer, int], Compile]] = {
    "llguidance": llguidance_compiler,
    "xgrammar": xgrammar_compiler,
}


@dataclass
class Result:
    """What one library did."""

    init_s: float = 0.0
    compile_s: list[float] = field(default_factory=list)
    mask_s: list[float] = field(default_factory=list)
    texts: dict[int, str] = field(default_factory=dict)
    refused: dict[int, str] = field(default_factory=dict)
    invalid: dict[int, str] = field(default_factory=dict)
    unfinished: int = 0


def measure(create: Callable[[Tokenizer, int], Compile], tokenizer: Tokenizer, schemas: list[Any]) -> Result:
    result, eos = Result(), tokenizer.eos_token_id
    assert eos is not None
    started = time.perf_counter()
    compile_schema = create(tokenizer, eos)
    result.init_s = time.perf_counter() - started
    liking = _liking(tokenizer, eos)
    for number, schema in enumerate(schemas):
        started = time.perf_counter()
        try:
            matcher = compile_schema(json.dumps(schema))()
        except Exception as error:
            result.refused[number] = str(error).strip().splitlines()[0]
            continue
        result.compile_s.append(time.perf_counter() - started)
        tokens = write(matcher, liking, np.random.default_rng(number), eos, result.mask_s)
        if tokens is None:
            result.unfinished += 1
            continue
        text = tokenizer.decode(tokens)
        result.texts[number] = text
        if (problem := problem_with(text, schema)) is not None:
            result.invalid[number] = problem
    return result


def write(
    matcher: Matcher, liking: np.ndarray, rng: np.random.Generator, eos: int, times: list[float]
) -> list[int] | None:
    """Tokens of a text, or None if it does not end in time."""
    row = np.zeros((len(liking) + 31) // 32, dtype=np.int32)
    tokens: list[int] = []
    for _ in range(_MAX_TOKENS):
        started = time.perf_counter()
        matcher.fill(row)
        times.append(time.perf_counter() - started)
        allowed = np.unpackbits(row.view(np.uint8), bitorder="little")[: len(liking)].astype(bool)
        token = int(np.where(allowed, rng.gumbel(size=len(liking)) + liking, -np.inf).argmax())
        if not allowed[token] or not matcher.accept(token):
            return None
        if token == eos:
            return tokens
        tokens.append(token)
    return None


def _liking(tokenizer: Tokenizer, eos: int) -> np.ndarray:
    endings = [any(c in piece for c in b'"]}') for piece in _token_bytes(tokenizer)]
    liking = np.where(endings, 3.0, 0.0)
    liking[eos] = 12.0
    return liking


def problem_with(text: str, schema: Any) -> str | None:
    try:
        instance = json.loads(text)
    except ValueError as error:
        return f"no JSON: {error}"
    validator = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER)
    errors = list(validator.iter_errors(instance))
    return errors[0].message[:100] if errors else None


def count_foreign(
    create: Callable[[Tokenizer, int], Compile], tokenizer: Tokenizer, schemas: list[Any], texts: dict[int, str]
) -> tuple[int, list[str]]:
    """Valid texts of another library that this one stops, among those whose schema it takes."""
    eos = tokenizer.eos_token_id
    assert eos is not None
    compile_schema, tried, stopped = create(tokenizer, eos), 0, []
    for number, text in texts.items():
        try:
            matcher = compile_schema(json.dumps(schemas[number]))()
        except Exception:
            continue
        tried += 1
        plain = json.dumps(json.loads(text), ensure_ascii=False)
        if not all(matcher.accept(token) for token in [*tokenizer.encode(plain, add_special_tokens=False), eos]):
            stopped.append(f"{number}: {plain[:100]}")
    return tried, stopped


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--schemas", type=int, default=200)
    parser.add_argument("--library", choices=list(LIBRARIES), action="append")
    parser.add_argument("--verbose", action="store_true")
    options = parser.parse_args()
    with LLM(options.model, num_blocks=8, max_model_len=16) as llm:
        tokenizer = llm.engine.tokenizer
    schemas = [*map(random_schema, range(options.schemas)), *_EXOTIC]
    names = options.library or list(LIBRARIES)
    results = {name: measure(LIBRARIES[name], tokenizer, schemas) for name in names}
    for name, result in results.items():
        print(f"{name}: vocabulary {result.init_s * 1e3:.0f} ms")
        print(f"  compile {_spread(result.compile_s, 1e3)} ms, mask {_spread(result.mask_s, 1e6)} us")
        print(
            f"  {len(schemas)} schemas: {len(result.refused)} refused, {result.unfinished} texts unfinished,", end=" "
        )
        print(f"{len(result.texts)} finished, {len(result.invalid)} of them invalid")
        for other, theirs in results.items():
            if other != name:
                valid = {n: text for n, text in theirs.texts.items() if n not in theirs.invalid}
                tried, stopped = count_foreign(LIBRARIES[name], tokenizer, schemas, valid)
                print(f"  of {tried} valid texts of {other}, it would stop {len(stopped)}")
                if options.verbose:
                    print(*(f"    {line}" for line in stopped), sep="\n")
        if options.verbose:
            for kind, found in (("refused", result.refused), ("invalid", result.invalid)):
                for number, why in found.items():
                    print(f"  {kind} {number}: {why[:120]} | {json.dumps(schemas[number])[:300]}")


def _spread(seconds: list[float], scale: float) -> str:
    median, high = np.percentile(seconds, (50, 99)) * scale
    return f"p50 {median:.1f}, p99 {high:.1f}, max {max(seconds) * scale:.1f}"


if __name__ == "__main__":
    main()
