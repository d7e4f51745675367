"""The chunks of a streamed chat completion."""

from __future__ import annotations

from typing import Any

from ksana.server.streaming import SSE, TextTemplate
from ksana.types.output import RequestOutput
from ksana_openai_api.answers import Envelope, StreamUsage
from ksana_openai_api.choice import ChoiceReader, event_delta
from ksana_openai_api.logprobs import LogprobFormat

_KIND = "chat.completion.chunk"


class ChatChunks:
    """Encodes the outputs of one choice.

    Args:
        index: of the choice.
        reader: of its outputs.
        envelope, usage: of the whole answer.
        logprobs: writes log probabilities; None if they were not asked for.
    """

    def __init__(
        self,
        index: int,
        reader: ChoiceReader,
        envelope: Envelope,
        usage: StreamUsage,
        logprobs: LogprobFormat | None,
    ) -> None:
        self._index = index
        self._reader = reader
        self._envelope = envelope
        self._usage = usage
        self._logprobs = logprobs
        self._num_logprobs = 0
        self._text: TextTemplate | None = None
        self._is_uniform = reader.is_plain and logprobs is None and not usage.differs_by_chunk
        self._role_sent = False

    @staticmethod
    def last(envelope: Envelope, usage: StreamUsage) -> bytes:
        """The chunk behind all choices, with the token counts."""
        return SSE.encode(envelope.wrap(_KIND, [], usage=usage.total()))

    def of(self, output: RequestOutput) -> bytes:
        """All chunks for one output: the role before the first text, the reason after the last; maybe none."""
        data = b""
        if not self._role_sent:
            self._role_sent = True
            data = self._encode({"role": "assistant", "content": ""})
        if self._is_uniform and not output.finished:
            return data + self._encode_text(output.text_delta) if output.text_delta else data
        deltas = [event_delta(event) for event in self._reader.read(output)]
        logprobs = self._new_logprobs(output)
        if logprobs is not None and not deltas:
            deltas = [{"content": ""}]  # text that is held back; its tokens are told of now
        for number, delta in enumerate(deltas):
            data += self._encode(delta, logprobs=logprobs if number == 0 else None)
        if output.finished:
            data += self._encode({}, finish_reason=self._reader.finish_reason(output), stop_reason=output.stop_reason)
        return data

    def _new_logprobs(self, output: RequestOutput) -> dict[str, Any] | None:
        if self._logprobs is None or len(output.logprobs) == self._num_logprobs:
            return None
        new = output.logprobs[self._num_logprobs :]
        self._num_logprobs = len(output.logprobs)
        return self._logprobs.chat(new)

    def _encode_text(self, text: str) -> bytes:
        if self._text is None:
            self._text = TextTemplate(SSE, lambda content: self._chunk({"content": content}))
        return self._text.encode(text)

    def _encode(self, delta: dict[str, Any], **more: Any) -> bytes:
        return SSE.encode(self._chunk(delta, **more))

    def _chunk(self, delta: dict[str, Any], **more: Any) -> dict[str, Any]:
        choice = {"index": self._index, "delta": delta, "logprobs": None, "finish_reason": None, **more}
        return self._envelope.wrap(_KIND, [choice], **self._usage.fields())
