"""Compiled grammars: what they let through, and which are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import jsonschema
import numpy as np
import pytest
from hypothesis import given

from ksana import RequestError
from ksana.testing.json_schemas import random_schema
from ksana.text import FastTokenizer
from ksana.text.grammar import GrammarMatcher
from ksana.text.llguidance_grammar import GuidanceCompiler
from ksana.types.grammar import GrammarSpec

NUM_PADDING = 45
Compile = Callable[[GrammarSpec], GrammarMatcher]


@pytest.fixture(scope="module")
def compiler(byte_level: FastTokenizer) -> GuidanceCompiler:
    return GuidanceCompiler(byte_level, byte_level.vocab_size + NUM_PADDING, (eos(byte_level),))


def eos(tokenizer: FastTokenizer) -> int:
    assert tokenizer.eos_token_id is not None
    return tokenizer.eos_token_id


def allowed(matcher: GrammarMatcher, tokenizer: FastTokenizer) -> np.ndarray:
    mask = np.full((tokenizer.vocab_size + NUM_PADDING + 31) // 32, -1, dtype=np.int32)
    matcher.fill_mask(mask)
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))


def schema(value: Any) -> GrammarSpec:
    return GrammarSpec("json_schema", json.dumps(value))


def accepts(compiler: GuidanceCompiler, tokenizer: FastTokenizer, spec: GrammarSpec, text: str) -> bool:
    """Whether the whole of ``text``, and nothing less, may be written under ``spec``."""
    matcher = compiler.compile(spec).matcher()
    for token in [*tokenizer.encode(text, add_special_tokens=False), eos(tokenizer)]:
        if token not in allowed(matcher, tokenizer):
            return False
        matcher.accept(token)
    return True


def write(matcher: GrammarMatcher, tokenizer: FastTokenizer, seed: int, max_tokens: int = 400) -> str | None:
    """A text of a writer who knows nothing, but likes to come to an end; None if it does not."""
    rng = np.random.default_rng(seed)
    tokens: list[int] = []
    for _ in range(max_tokens):
        candidates = allowed(matcher, tokenizer)
        pieces = [tokenizer.token_bytes(int(token)) or b"" for token in candidates]
        weights = np.array([30.0 if any(c in piece for c in b'"}]') else 1.0 for piece in pieces])
        token = int(rng.choice(candidates, p=weights / weights.sum()))
        if eos(tokenizer) in candidates:
            return tokenizer.decode(tokens)
        tokens.append(token)
        matcher.accept(token)
    return None


def test_what_is_written_under_200_schemas_is_valid(compiler: GuidanceCompiler, byte_level: FastTokenizer) -> None:
    finished = 0
    for seed in range(200):
        value = random_schema(seed)
        text = write(compiler.compile(schema(value)).matcher(), byte_level, seed)
        if text is not None:
            finished += 1
            validator = jsonschema.Draft202012Validator(
                value, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER
            )
            validator.validate(json.loads(text))
    assert finished > 150


def test_padding_and_special_tokens_are_never_let_through(
    compiler: GuidanceCompiler, byte_level: FastTokenizer
) -> None:
    matcher = compiler.compile(GrammarSpec("regex", "(?s:.*)")).matcher()
    for token in byte_level.encode("the cat", add_special_tokens=False):
        possible = set(allowed(matcher, byte_level).tolist())
        assert possible & byte_level.special_token_ids <= {eos(byte_level)}
        assert max(possible) < byte_level.vocab_size
        assert len(possible) > 200
        matcher.accept(token)


INTEGERS = {"type": "array", "items": {"type": "integer"}, "minItems": 1}


@pytest.mark.parametrize(
    "value",
    [
        {"type": "array", "items": INTEGERS},
        {
            "type": "object",
            "properties": {"a": INTEGERS, "b": INTEGERS},
            "required": ["a"],
            "additionalProperties": False,
        },
    ],
)
def test_a_writer_of_blanks_has_to_stop(
    compiler: GuidanceCompiler, byte_level: FastTokenizer, value: dict[str, Any]
) -> None:
    matcher = compiler.compile(schema(value)).matcher()
    run = longest = 0
    for _ in range(300):
        candidates = allowed(matcher, byte_level).tolist()
        blanks = [t for t in candidates if not (byte_level.token_bytes(t) or b"x").strip()]
        brackets = [t for t in candidates if byte_level.token_bytes(t) in (b"{", b"[", b",")]
        run = run + 1 if blanks else 0
        longest = max(longest, run)
        matcher.accept((blanks or brackets or candidates)[0])
    assert 0 < longest <= 25


def test_a_complete_text_ends(compiler: GuidanceCompiler, byte_level: FastTokenizer) -> None:
    matcher = compiler.compile(GrammarSpec.choice(["the cat"])).matcher()
    for token in byte_level.encode("the cat", add_special_tokens=False):
        matcher.accept(token)
    for _ in range(3):  # drafts may go on behind the end
        assert allowed(matcher, byte_level).tolist() == [eos(byte_level)]
        matcher.accept(eos(byte_level))


def test_nothing_follows_a_token_that_does_not_fit(compiler: GuidanceCompiler, byte_level: FastTokenizer) -> None:
    matcher = compiler.compile(GrammarSpec("regex", "[0-9]+")).matcher()
    matcher.accept(byte_level.encode("x", add_special_tokens=False)[0])
    matcher.accept(byte_level.encode("1", add_special_tokens=False)[0])
    assert not len(allowed(matcher, byte_level))


def test_texts_of_one_grammar_do_not_meet(compiler: GuidanceCompiler, byte_level: FastTokenizer) -> None:
    grammar = compiler.compile(GrammarSpec.choice(["ab", "cd"]))
    one, other = grammar.matcher(), grammar.matcher()
    one.accept(byte_level.encode("a", add_special_tokens=False)[0])
    assert byte_level.encode("c", add_special_tokens=False)[0] in allowed(other, byte_level)
    assert allowed(one, byte_level).tolist() == byte_level.encode("b", add_special_tokens=False)


@given(texts=st.lists(st.text(min_size=1, max_size=8), min_size=1, max_size=5), other=st.text(min_size=1, max_size=8))
def test_choices_are_taken_literally(
    compiler: GuidanceCompiler, byte_level: FastTokenizer, texts: list[str], other: str
) -> None:
    spec = GrammarSpec.choice(texts)
    for text in texts:
        assert accepts(compiler, byte_level, spec, text)
    assert accepts(compiler, byte_level, spec, other) == (other in texts)


@pytest.mark.parametrize(
    ("spec", "good", "bad"),
    [
        (GrammarSpec("json_object"), '{"a": [1, {"b": null}]}', "[1]"),
        (GrammarSpec("json_object"), '{\n    "a": 1\n}', '{"a":    1}'),
        (GrammarSpec("regex", r"^\d{3}$"), "123", "1234"),
        (GrammarSpec("regex", r"a.c"), "a日c", "a\nc"),
        (GrammarSpec("ebnf", 'root ::= "a" item+\nitem ::= [0-9] | "x"\n'), "a1x", "a"),
        (GrammarSpec("ebnf", 'start: WORD ("," WORD)*\nWORD: /[a-z]+/\n'), "ab,c", "ab,"),
        (schema({"type": "integer", "minimum": 3, "maximum": 12}), "12", "13"),
        (schema({"type": "string", "maxLength": 3}), '"日本語"', '"abcd"'),
    ],
)
def test_kinds(compiler: GuidanceCompiler, byte_level: FastTokenizer, spec: GrammarSpec, good: str, bad: str) -> None:
    assert accepts(compiler, byte_level, spec, good)
    assert not accepts(compiler, byte_level, spec, bad)


def nested(depth: int) -> dict[str, Any]:
    value: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        value = {"type": "object", "properties": {"a": value}}
    return value


@pytest.mark.parametrize(
    "spec",
    [
        GrammarSpec("json_schema", "{"),
        GrammarSpec("json_schema", "[" * 100_000),
        GrammarSpec("json_schema", '{"multipleOf": NaN}'),
        schema([1]),
        schema(True),
        schema({"type": "strin"}),
        schema({"type": 5}),
        schema({"type": "integer", "minimum": 5, "maximum": 3}),
        schema({"enum": []}),
        schema({"$ref": "#"}),
        schema({"$ref": "#/$defs/missing"}),
        schema({"$ref": "http://127.0.0.1:1/x.json"}),
        schema({"$ref": "file:///etc/passwd"}),
        schema({"type": "string", "pattern": "("}),
        # What the library cannot do is refused, never disregarded.
        schema({"type": "array", "uniqueItems": True}),
        schema({"type": "string", "pattern": "^(?=a)"}),
        # Too much work.
        schema(nested(200)),
        schema({"type": "integer", "multipleOf": 9_999_991}),
        schema({"type": "integer", "allOf": [{"multipleOf": 9973}, {"multipleOf": 9967}]}),
        GrammarSpec("regex", "((a{1000}){1000})"),
        GrammarSpec("regex", "(" * 8000 + ")" * 8000),
        GrammarSpec("regex", "("),
        GrammarSpec("regex", r"(a)\1"),
        GrammarSpec("ebnf", "nonsense"),
        GrammarSpec("ebnf", "root ::= missing"),
        GrammarSpec("ebnf", "root ::= root"),
        GrammarSpec("ebnf", "root ::= " + "(" * 5000 + '"a"' + ")" * 5000),
        GrammarSpec("choice", "[]"),
        GrammarSpec("choice", '["a", 1]'),
        GrammarSpec("choice", '"a"'),
    ],
    ids=range(30),
)
def test_what_cannot_be_used_is_refused(compiler: GuidanceCompiler, spec: GrammarSpec) -> None:
    with pytest.raises(RequestError) as refusal:
        compiler.compile(spec)
    assert (refusal.value.status, refusal.value.param) == (400, "grammar")
    assert len(refusal.value.message) < 700 and "\n" not in refusal.value.message


def test_a_wrong_regex_is_told_what_is_wrong_with_it(compiler: GuidanceCompiler) -> None:
    with pytest.raises(RequestError, match=r"\[a-z\]\{3\}\(.*unclosed group$"):
        compiler.compile(GrammarSpec("regex", "[a-z]{3}("))


def test_texts_whose_masks_take_too_long_come_to_an_end(
    compiler: GuidanceCompiler, byte_level: FastTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    matcher = compiler.compile(GrammarSpec("regex", "[a-z]+")).matcher()
    hours = iter(range(100))
    monkeypatch.setattr("time.thread_time", lambda: 3600.0 * next(hours))
    assert not len(allowed(matcher, byte_level))


@pytest.mark.parametrize(
    ("kind", "value"), [("yaml", "a"), ("regex", ""), ("regex", 5), ("json_object", "{}"), ("regex", "a" * 20_000)]
)
def test_specifications_have_a_kind_and_a_size(kind: Any, value: Any) -> None:
    with pytest.raises(RequestError) as refusal:
        GrammarSpec(kind, value)
    assert refusal.value.param == "grammar"
