"""The exact bytes that a token of a ``tokenizers`` vocabulary adds to a text.

Two decoders cover nearly every model served today, and both write bytes: the byte-level one (GPT-2, Llama 3, Qwen,
SmolLM) spells each byte as one printable character, the byte-fallback one (Llama 1 and 2, Mistral) writes ``▁`` for a
space and ``<0xNN>`` for a byte that has no piece of its own. Knowing the bytes makes decoding a join, and streaming
exact: a text is the UTF-8 decoding of what its tokens add, whichever way they are cut.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_SPACE_PIECE = "\u2581"
_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True, slots=True)
class ByteDecoding:
    """How a decoder turns token strings into bytes.

    Attributes:
        to_bytes: bytes of one token string.
        strips_leading_space: whether one space at the very start of a text is dropped.
    """

    to_bytes: Callable[[str], bytes]
    strips_leading_space: bool


def byte_level_characters() -> dict[str, int]:
    """The character that spells each byte in byte-level vocabularies, as {character: byte}.

    Printable Latin-1 characters stand for themselves, the other 68 bytes for U+0100 and on, in order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    table = {chr(byte): byte for byte in printable}
    table.update({chr(0x100 + index): byte for index, byte in enumerate(others)})
    return table


_BYTE_OF_CHARACTER = byte_level_characters()


def _byte_level(token: str) -> bytes:
    # An added token may hold characters outside the table; then the whole token is taken as it is written.
    try:
        return bytes([_BYTE_OF_CHARACTER[character] for character in token])
    except KeyError:
        return token.encode("utf-8")


def _byte_fallback(token: str) -> bytes:
    match = _BYTE_PIECE.fullmatch(token)
    if match:
        return bytes([int(match.group(1), 16)])
    return token.replace(_SPACE_PIECE, " ").encode("utf-8")


def byte_decoding(decoder_json: bytes | None) -> ByteDecoding | None:
    """Recognise a decoder from its JSON (what ``tokenizers`` writes under ``decoder``).

    Returns:
        How it makes bytes, or None if the decoder does more than writing bytes one token after another.
    """
    if decoder_json is None:
        return None
    decoder = json.loads(decoder_json)
    steps: list[dict[str, Any]] = decoder["decoders"] if decoder.get("type") == "Sequence" else [decoder]
    kinds = [step.get("type") for step in steps]
    if kinds == ["ByteLevel"]:
        return ByteDecoding(_byte_level, strips_leading_space=False)
    if kinds[:3] != ["Replace", "ByteFallback", "Fuse"]:
        return None
    if steps[0].get("pattern") != {"String": _SPACE_PIECE} or steps[0].get("content") != " ":
        return None
    if kinds[3:] == []:
        return ByteDecoding(_byte_fallback, strips_leading_space=False)
    if kinds[3:] == ["Strip"] and (steps[3]["content"], steps[3]["start"], steps[3]["stop"]) == (" ", 1, 0):
        return ByteDecoding(_byte_fallback, strips_leading_space=True)
    return None
