"""The choices of a text completion, whole and in pieces."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ksana.types.output import RequestOutput
from ksana_openai_api.answers import finish_of
from ksana_openai_api.logprobs import LogprobFormat
from ksana_openai_api.requests import CompletionRequest


@dataclass(frozen=True, slots=True)
class ChoiceFormat:
    """What choices consist of, by what the request asks for.

    Attributes:
        echo: the prompt comes first.
        logprobs: log probabilities come along.
        prompt_logprobs, token_ids: further fields come along.
        format: writes log probabilities.
    """

    echo: bool
    logprobs: bool
    prompt_logprobs: bool
    token_ids: bool
    format: LogprobFormat

    @classmethod
    def of(cls, body: CompletionRequest, logprobs: LogprobFormat) -> ChoiceFormat:
        """What ``body`` asks for."""
        return cls(
            echo=bool(body.echo),
            logprobs=body.logprobs is not None,
            prompt_logprobs=body.prompt_logprobs is not None,
            token_ids=bool(body.return_token_ids),
            format=logprobs,
        )

    @property
    def is_text_alone(self) -> bool:
        """True if pieces of a stream differ in nothing but their text."""
        return not (self.echo or self.logprobs or self.prompt_logprobs or self.token_ids)

    def whole(self, index: int, prompt: str, output: RequestOutput) -> dict[str, Any]:
        """A whole choice.

        Args:
            prompt: its text, for an echo.
        """
        piece = ChoicePieces(index, prompt, self)
        return piece.next(output, output.text, output.token_ids)


class ChoicePieces:
    """Makes the pieces of one choice of a stream; a single piece is the whole.

    Args:
        index: of the choice.
        prompt: its text, for an echo.
        format: of the pieces.
    """

    def __init__(self, index: int, prompt: str, format: ChoiceFormat) -> None:
        self._index = index
        self._prompt = prompt
        self._format = format
        self._is_first = True
        self._num_logprobs = 0
        self._offset = 0

    def next(self, output: RequestOutput, text: str, token_ids: list[int]) -> dict[str, Any]:
        """The piece for the news of ``output``: more ``text``, of more ``token_ids``."""
        format, is_first = self._format, self._is_first
        self._is_first = False
        echoed = format.echo and is_first
        choice: dict[str, Any] = {
            "index": self._index,
            "text": self._prompt + text if echoed else text,
            "logprobs": self._logprobs(output, token_ids, echoed) if format.logprobs else None,
            "finish_reason": finish_of(output.finish_reason),
            "stop_reason": output.stop_reason,
        }
        if format.prompt_logprobs and is_first:
            choice["prompt_logprobs"] = format.format.prompt(output.prompt_logprobs)
        if format.token_ids:
            choice["token_ids"] = token_ids
            if is_first:
                choice["prompt_token_ids"] = output.prompt_token_ids
        return choice

    def _logprobs(self, output: RequestOutput, token_ids: list[int], echoed: bool) -> dict[str, Any] | None:
        entries: list[Any] = output.logprobs[self._num_logprobs :]
        self._num_logprobs = len(output.logprobs)
        if echoed:
            entries = [*output.prompt_logprobs, *entries]
            token_ids = [*output.prompt_token_ids, *token_ids]
        if not token_ids:
            return None
        found: dict[str, Any] = self._format.format.completion(entries, token_ids, self._offset)
        self._offset = found["text_offset"][-1] + len(found["tokens"][-1])
        return found
