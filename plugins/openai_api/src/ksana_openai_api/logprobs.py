"""Log probabilities in the forms of chat and of text completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ksana.text.tokenizer import Tokenizer
from ksana.types.output import TokenLogprobs

_LEAST = -9999.0
"""What is said instead of minus infinity, which JSON cannot."""


class LogprobFormat:
    """Writes log probabilities with tokens as text.

    A token need not be text of its own: bytes that are no UTF-8 become U+FFFD, and ``bytes`` tells them exactly.

    Args:
        tokenizer: the model's.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def chat(self, entries: Sequence[TokenLogprobs]) -> dict[str, Any]:
        """``logprobs`` of a chat choice."""
        return {"content": [self._chat_token(entry) for entry in entries], "refusal": None}

    def completion(self, entries: Sequence[TokenLogprobs | None], token_ids: Sequence[int], start: int) -> Any:
        """``logprobs`` of a text completion.

        Args:
            entries: None for the first token of a prompt, which nothing precedes.
            token_ids: the tokens that the entries are about.
            start: length of the text before them.
        """
        tokens = [self._text(token_id) for token_id in token_ids]
        offsets = []
        for token in tokens:
            offsets.append(start)
            start += len(token)
        return {
            "tokens": tokens,
            "token_logprobs": [None if entry is None else max(entry.logprob, _LEAST) for entry in entries],
            "top_logprobs": [None if entry is None else self._by_text(entry) for entry in entries],
            "text_offset": offsets,
        }

    def prompt(self, entries: Sequence[TokenLogprobs | None]) -> list[dict[str, Any] | None]:
        """``prompt_logprobs`` as vLLM gives them: for each token of the prompt, candidates by token id."""
        return [None if entry is None else self._by_id(entry) for entry in entries]

    def _chat_token(self, entry: TokenLogprobs) -> dict[str, Any]:
        top = [self._describe(token_id, logprob) for token_id, logprob in entry.top]
        return {**self._describe(entry.token_id, entry.logprob), "top_logprobs": top}

    def _describe(self, token_id: int, logprob: float) -> dict[str, Any]:
        data = self._tokenizer.token_bytes(token_id)
        if data is None:
            text = self._text(token_id)
            return {"token": text, "logprob": max(logprob, _LEAST), "bytes": list(text.encode())}
        text = data.decode("utf-8", errors="replace")
        return {"token": text, "logprob": max(logprob, _LEAST), "bytes": list(data)}

    def _by_text(self, entry: TokenLogprobs) -> dict[str, float]:
        # Two tokens may have the same text, and the likelier one comes first.
        found: dict[str, float] = {}
        for token_id, logprob in (*entry.top, (entry.token_id, entry.logprob)):
            found.setdefault(self._text(token_id), max(logprob, _LEAST))
        return found

    def _by_id(self, entry: TokenLogprobs) -> dict[str, Any]:
        found = {token_id: (logprob, rank) for rank, (token_id, logprob) in enumerate(entry.top, 1)}
        found.setdefault(entry.token_id, (entry.logprob, None))  # type: ignore[arg-type]  # its rank is not known
        return {
            str(token_id): {
                "logprob": max(logprob, _LEAST),
                "rank": rank,
                "decoded_token": self._text(token_id),
            }
            for token_id, (logprob, rank) in found.items()
        }

    def _text(self, token_id: int) -> str:
        data = self._tokenizer.token_bytes(token_id)
        if data is None:
            return self._tokenizer.decode([token_id], skip_special_tokens=False)
        return data.decode("utf-8", errors="replace")
