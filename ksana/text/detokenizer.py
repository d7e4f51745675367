"""Incremental detokenization: token ids in, text that is safe to send out.

Whatever the cut, the deltas of a sequence and its ``finish`` join to the text that decoding the whole sequence behind
its prompt would add. Only the bytes of an unfinished character are held back.
"""

from __future__ import annotations

from codecs import utf_8_decode
from typing import Protocol

from ksana.text.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"
_MAX_UTF8_TAIL = 3
_MAX_HELD_TOKENS = 8
_WINDOW_CONTEXT = 6
_MAX_WINDOW = 32


class IncrementalDetokenizer(Protocol):
    """Turns one sequence's tokens into text. One instance a sequence; not thread safe."""

    def push(self, token_ids: list[int]) -> str:
        """Text that has become certain with these tokens; may be empty."""

    def finish(self) -> str:
        """What is still held back, an unfinished character as U+FFFD. Nothing may be pushed afterwards."""


class Detokenizers:
    """Makes the detokenizers of a tokenizer's sequences, which share what its tokens mean."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._texts = {skip: TokenTexts(tokenizer, skip) for skip in (True, False)}

    def create(self, prompt_token_ids: list[int], skip_special_tokens: bool = True) -> IncrementalDetokenizer:
        """Make the detokenizer of a sequence that continues ``prompt_token_ids``."""
        if self._tokenizer.is_byte_exact:
            return ByteDetokenizer(self._tokenizer, prompt_token_ids, self._texts[skip_special_tokens])
        return WindowDetokenizer(self._tokenizer, prompt_token_ids, skip_special_tokens)


class TokenTexts(dict[int, str | None]):
    """Text of each token that has been asked for; None for those that end within a character.

    Args:
        skip_special_tokens: special tokens have no text.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        self._token_bytes = tokenizer.token_bytes
        self._skipped = tokenizer.special_token_ids if skip_special_tokens else frozenset()

    def data(self, token_id: int) -> bytes:
        """Bytes of a token."""
        return b"" if token_id in self._skipped else self._token_bytes(token_id) or b""

    def __missing__(self, token_id: int) -> str | None:
        data = self.data(token_id)
        text, num_decoded = utf_8_decode(data, "replace")
        self[token_id] = whole = text if num_decoded == len(data) else None
        return whole


class ByteDetokenizer:
    """For tokenizers whose tokens have bytes of their own: a UTF-8 decoder that remembers. O(1) a token.

    If the prompt ends within a character, the output completes it. If it does not, the U+FFFD that stands for the
    prompt's broken tail belongs to the prompt and is not sent.
    """

    __slots__ = ("_at_boundary", "_completes_prompt", "_strip_space", "_texts", "_unfinished")

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: list[int], texts: TokenTexts) -> None:
        self._texts = texts
        tail = self._prompt_tail(prompt_token_ids)
        self._strip_space = tokenizer.strips_leading_space and not tail
        tail = tail[-_MAX_UTF8_TAIL:]
        self._unfinished = tail[utf_8_decode(tail, "replace")[1] :]
        """Bytes of a character that lacks its end."""
        self._completes_prompt = bool(self._unfinished)
        self._at_boundary = False
        """The next token's text does not depend on what was before."""

    def push(self, token_ids: list[int]) -> str:
        """Text that has become certain."""
        if self._at_boundary and len(token_ids) == 1:  # as in nearly every step
            text = self._texts[token_ids[0]]
            if text is not None:
                return text
        return self._decode(self._join(token_ids))

    def finish(self) -> str:
        """The unfinished character, if there is one."""
        return self._without_prompt(self._unfinished.decode("utf-8", "replace"))

    def _decode(self, data: bytes) -> str:
        if self._strip_space and data:
            data = data.removeprefix(b" ")
            self._strip_space = False
        data = self._unfinished + data
        text, num_decoded = utf_8_decode(data, "replace")
        self._unfinished = data[num_decoded:]
        text = self._without_prompt(text)
        self._at_boundary = not (self._unfinished or self._strip_space or self._completes_prompt)
        return text

    def _join(self, token_ids: list[int]) -> bytes:
        return b"".join(map(self._texts.data, token_ids))

    def _prompt_tail(self, prompt_token_ids: list[int]) -> bytes:
        """The last bytes of the prompt: no more than decide how the output begins."""
        tail = b""
        for token_id in reversed(prompt_token_ids):
            if len(tail) >= _MAX_UTF8_TAIL:
                break
            tail = self._join([token_id]) + tail
        return tail

    def _without_prompt(self, text: str) -> str:
        if not self._completes_prompt or not text:
            return text
        self._completes_prompt = False
        return text.removeprefix(_REPLACEMENT)


class WindowDetokenizer:
    """For any other tokenizer: decode a short window twice, with and without the new tokens, and send the difference.

    The window begins at a place where text was last known to be whole, so its length does not grow with the output.
    A trailing U+FFFD may be half a character and is held back, for no more than a few tokens: bytes that stay invalid
    are sent as what they decode to.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: list[int], skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        # Skipped tokens would only lengthen the window.
        self._skipped = tokenizer.special_token_ids if skip_special_tokens else frozenset()
        self._window = [i for i in prompt_token_ids if i not in self._skipped][-_WINDOW_CONTEXT:]
        self._read_offset = len(self._window)

    def push(self, token_ids: list[int]) -> str:
        """Text that has become certain."""
        return "".join([self._push_one(token_id) for token_id in token_ids if token_id not in self._skipped])

    def finish(self) -> str:
        """What was held back."""
        return self._emit()

    def _push_one(self, token_id: int) -> str:
        self._window.append(token_id)
        held = len(self._window) - self._read_offset
        if held < _MAX_HELD_TOKENS and self._decode(self._window).endswith(_REPLACEMENT):
            return ""
        return self._emit()

    def _emit(self) -> str:
        before = self._decode(self._window[: self._read_offset])
        text = self._decode(self._window)
        if not text.startswith(before):
            # A character that the window began with half of is whole now; what came before it has been sent.
            before = before.rstrip(_REPLACEMENT)
        delta = text[len(before) :]
        if delta or len(self._window) > _MAX_WINDOW:
            self._window = self._window[self._read_offset :]
            self._read_offset = len(self._window)
        return delta

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip_special_tokens)
