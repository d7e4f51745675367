"""Reading answers: from bytes to chunks of JSON, and from those to text, times and counts of tokens."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, Protocol

import orjson

from ksana.bench.records import CountSource

_DONE = b"[DONE]"


class BadAnswerError(Exception):
    """A server answered 200 and then something else than a complete answer.

    Args:
        kind: what failures are counted by.
        detail: what there was instead.
    """

    def __init__(self, kind: str, detail: str = "") -> None:
        super().__init__(kind, detail)
        self.kind = kind
        self.detail = detail


class Frames(Protocol):
    """Cuts a stream of bytes into the JSON texts in it."""

    def split(self, data: bytes) -> Iterator[bytes]:
        """Yield the texts that ``data`` completes."""

    def finish(self) -> bytes:
        """What is left at the end of the stream: a last text without an end mark, or nothing."""


class SseFrames:
    """Server-sent events: lines that begin with ``data:``; all others are comments and ends of events."""

    def __init__(self) -> None:
        self._rest = b""

    def split(self, data: bytes) -> Iterator[bytes]:
        *lines, self._rest = (self._rest + data if self._rest else data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip()

    def finish(self) -> bytes:
        return self._rest.removeprefix(b"data:").strip()


class NulFrames:
    """Texts that each end with a zero byte."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []

    def split(self, data: bytes) -> Iterator[bytes]:
        first, *more = data.split(b"\0")
        self._pieces.append(first)
        if more:
            *whole, rest = more
            yield b"".join(self._pieces)
            self._pieces = [rest]
            yield from whole

    def finish(self) -> bytes:
        return b"".join(self._pieces).strip()


class WholeBody:
    """One text, which ends with the body."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []

    def split(self, data: bytes) -> Iterator[bytes]:
        self._pieces.append(data)
        yield from ()

    def finish(self) -> bytes:
        return b"".join(self._pieces)


class AnswerReader(ABC):
    """Reads one answer.

    Attributes:
        chunk_times: when each piece arrived that carried tokens; empty for an answer that came whole.
        prompt_tokens, cached_tokens: if the server tells.
        count_source: where ``output_tokens`` comes from.
    """

    def __init__(self, frames: Frames) -> None:
        self._frames = frames
        self._is_stream = not isinstance(frames, WholeBody)
        self.chunk_times: list[float] = []
        self.prompt_tokens: int | None = None
        self.cached_tokens: int | None = None
        self.output_tokens = 0
        self.count_source: CountSource = "chunks"
        self.finish_reason: str | None = None
        self.is_complete = False
        self._texts: list[str] = []

    @property
    def text(self) -> str:
        """The text so far."""
        return "".join(self._texts)

    def feed(self, data: bytes, now: float) -> None:
        """Take bytes that arrived at ``now``.

        Raises:
            BadAnswerError: they are no JSON, or tell of an error.
        """
        for frame in self._frames.split(data):
            self._take(frame, now)

    def finish(self, now: float) -> None:
        """Take note of the end of the body.

        Raises:
            BadAnswerError: the answer is not complete.
        """
        if rest := self._frames.finish():
            self._take(rest, now)
        if not self.is_complete:
            raise BadAnswerError("incomplete answer", "the connection ended before the answer did")

    def _take(self, frame: bytes, now: float) -> None:
        if frame == _DONE:
            self.is_complete = True
            return
        try:
            chunk = orjson.loads(frame)
        except orjson.JSONDecodeError:
            raise BadAnswerError("malformed answer", f"not JSON: {frame[:100]!r}") from None
        if isinstance(chunk, dict) and chunk.get("error"):
            raise BadAnswerError("error in the answer", error_message(chunk))
        try:
            has_tokens = self._read(chunk)
        except (KeyError, IndexError, TypeError, AttributeError):
            raise BadAnswerError("malformed answer", f"unexpected JSON: {frame[:100]!r}") from None
        if has_tokens and self._is_stream:
            self.chunk_times.append(now)

    @abstractmethod
    def _read(self, chunk: dict[str, Any]) -> bool:
        """Take what ``chunk`` has; returns whether it carried tokens."""


class OpenAiAnswer(AnswerReader):
    """What completions and chat completions have in common."""

    def _read(self, chunk: dict[str, Any]) -> bool:
        if usage := chunk.get("usage"):
            self._read_usage(usage)
        has_tokens = False
        for choice in chunk["choices"]:
            has_tokens |= self._read_choice(choice)
            self.finish_reason = choice.get("finish_reason") or self.finish_reason
        if has_tokens and self.count_source == "chunks":
            self.output_tokens += 1
        self.is_complete = self.is_complete or not self._is_stream
        return has_tokens

    def finish(self, now: float) -> None:
        # Some servers leave out the end mark; a reason to finish is as good.
        self.is_complete = self.is_complete or self.finish_reason is not None
        super().finish(now)

    def _read_usage(self, usage: dict[str, Any]) -> None:
        self.prompt_tokens = usage["prompt_tokens"]
        self.output_tokens = usage.get("completion_tokens") or 0
        self.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        self.count_source = "usage"

    @abstractmethod
    def _read_choice(self, choice: dict[str, Any]) -> bool:
        """Take the text of ``choice``; returns whether it stands for tokens."""


class CompletionAnswer(OpenAiAnswer):
    """Chunks of ``/v1/completions``."""

    def _read_choice(self, choice: dict[str, Any]) -> bool:
        text = choice["text"]
        self._texts.append(text)
        # A chunk without text that is not the last one tells of a token that shows only with the next.
        return bool(text) or not choice.get("finish_reason")


class ChatAnswer(OpenAiAnswer):
    """Chunks of ``/v1/chat/completions``; thoughts that are sent apart count as tokens, and are not text."""

    def _read_choice(self, choice: dict[str, Any]) -> bool:
        delta = choice["delta" if self._is_stream else "message"]
        text = delta.get("content") or ""
        self._texts.append(text)
        return bool(text or delta.get("reasoning_content") or delta.get("reasoning") or delta.get("tool_calls"))


class GenerateAnswer(AnswerReader):
    """Chunks of ``/generate``, each of which has the whole answer so far."""

    def __init__(self, frames: Frames) -> None:
        super().__init__(frames)
        self.count_source = "ids"

    def _read(self, chunk: dict[str, Any]) -> bool:
        num_tokens = len(chunk["output_token_ids"][0])
        has_tokens = num_tokens > self.output_tokens
        self.output_tokens = num_tokens
        self.prompt_tokens = len(chunk["input_token_ids"])
        self._texts = [chunk["texts"][0]]
        if reasons := chunk.get("finish_reasons"):
            self.finish_reason = reasons[0]
        self.is_complete = True  # the format has no end mark that every server sends
        return has_tokens


def error_message(body: Any) -> str:
    """The message of an error body of any common shape."""
    error = body.get("error", body) if isinstance(body, dict) else body
    if isinstance(error, dict):
        error = error.get("message") or error.get("detail") or error
    return str(error)
