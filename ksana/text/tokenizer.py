"""What the engine asks of a tokenizer, and the one implementation that serves nearly every model."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from ksana.errors import RequestError
from ksana.text.token_bytes import byte_decoding

if TYPE_CHECKING:
    import tokenizers


@runtime_checkable
class Tokenizer(Protocol):
    """Text to token ids and back. Implementations must be safe to call from several threads at once."""

    @property
    def vocab_size(self) -> int:
        """One more than the highest token id that has a string, added tokens included."""

    @property
    def bos_token_id(self) -> int | None:
        """Token that begins a sequence, if the model has one."""

    @property
    def eos_token_id(self) -> int | None:
        """Token that ends a sequence, if the model has one."""

    @property
    def bos_token(self) -> str:
        """String of the beginning-of-sequence token for chat templates; empty if there is none."""

    @property
    def eos_token(self) -> str:
        """String of the end-of-sequence token for chat templates; empty if there is none."""

    @property
    def special_token_ids(self) -> frozenset[int]:
        """Tokens that ``skip_special_tokens`` leaves out of a text."""

    @property
    def is_byte_exact(self) -> bool:
        """True if :meth:`token_bytes` knows every token and :meth:`decode` is the UTF-8 decoding of their join."""

    @property
    def strips_leading_space(self) -> bool:
        """True if :meth:`decode` drops one space at the very start of a text."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of ``text``. Raises :class:`RequestError` for a text that UTF-8 cannot encode."""

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        """Text of ``ids``. Unknown ids add nothing; bytes that are no UTF-8 become U+FFFD. Never raises."""

    def token_bytes(self, token_id: int) -> bytes | None:
        """Bytes that the token adds to a text (none for an unknown id), or None if they depend on its neighbours."""


class FastTokenizer:
    """:class:`Tokenizer` on the Rust ``tokenizers`` library.

    Where the decoder only writes bytes (see :mod:`ksana.text.token_bytes`) decoding is done here, so that a stream
    and a whole text agree for every sequence of ids, valid UTF-8 or not. Other decoders are asked themselves.

    Args:
        backend: a tokenizer that nobody changes any more; truncation and padding are switched off.
        bos_token, eos_token: strings of the special tokens; None if the model has none.
    """

    def __init__(
        self, backend: tokenizers.Tokenizer, bos_token: str | None = None, eos_token: str | None = None
    ) -> None:
        # A tokenizer.json may carry the truncation and padding of its training run, which would cut prompts silently.
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._bos_token = bos_token
        self._eos_token = eos_token
        self._decoding = byte_decoding(_decoder_json(backend))
        self._special_token_ids = frozenset(
            i for i, token in backend.get_added_tokens_decoder().items() if token.special
        )

    @property
    def vocab_size(self) -> int:
        """One more than the highest token id that has a string."""
        return self._vocab_size

    @cached_property
    def _vocab_size(self) -> int:
        return max(self._backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    @cached_property
    def bos_token_id(self) -> int | None:
        """Token that begins a sequence."""
        return None if self._bos_token is None else self._backend.token_to_id(self._bos_token)

    @cached_property
    def eos_token_id(self) -> int | None:
        """Token that ends a sequence."""
        return None if self._eos_token is None else self._backend.token_to_id(self._eos_token)

    @property
    def bos_token(self) -> str:
        """String of the beginning-of-sequence token, or empty."""
        return self._bos_token or ""

    @property
    def eos_token(self) -> str:
        """String of the end-of-sequence token, or empty."""
        return self._eos_token or ""

    @property
    def special_token_ids(self) -> frozenset[int]:
        """Tokens that ``skip_special_tokens`` leaves out."""
        return self._special_token_ids

    @property
    def is_byte_exact(self) -> bool:
        """True if every token has bytes of its own."""
        return self._decoding is not None

    @property
    def strips_leading_space(self) -> bool:
        """True if one space at the very start of a text is dropped."""
        return self._decoding is not None and self._decoding.strips_leading_space

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of ``text``; :class:`RequestError` if it holds a lone surrogate."""
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise RequestError(
                f"the text holds a lone surrogate (U+{ord(text[error.start]):04X}) at character {error.start}, "
                "which no UTF-8 text can hold",
                code="invalid_text",
                param="prompt",
            ) from None
        # Only the batch method lets go of the interpreter lock: a long prompt in a thread must not hold up the others.
        # The fast one leaves out offsets, which nobody reads.
        return list(self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids)

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        """Text of ``ids``; unknown ids add nothing."""
        if self._decoding is None:
            known = [i for i in ids if 0 <= i < self._vocab_size]
            return self._backend.decode(known, skip_special_tokens=skip_special_tokens)
        skipped: Iterable[int] = self._special_token_ids if skip_special_tokens else ()
        pieces = self._pieces
        data = b"".join([pieces[i] for i in ids if 0 <= i < len(pieces) and i not in skipped])
        if self._decoding.strips_leading_space and data.startswith(b" "):
            data = data[1:]
        return data.decode("utf-8", errors="replace")

    def token_bytes(self, token_id: int) -> bytes | None:
        """Bytes that the token adds to a text."""
        if self._decoding is None:
            return None
        pieces = self._pieces
        return pieces[token_id] if 0 <= token_id < len(pieces) else b""

    @cached_property
    def _pieces(self) -> list[bytes]:
        """Bytes of every token. Computed at the first use; two threads that meet here compute the same."""
        assert self._decoding is not None
        to_bytes = self._decoding.to_bytes
        pieces = [b""] * self._vocab_size
        for token, token_id in self._backend.get_vocab(with_added_tokens=True).items():
            pieces[token_id] = to_bytes(token)
        return pieces


def _decoder_json(backend: tokenizers.Tokenizer) -> bytes | None:
    # Pickling a decoder gives its JSON; serialising the whole tokenizer for it would write megabytes.
    return None if backend.decoder is None else backend.decoder.__getstate__()
