"""From tokens to text: detokenisation, stop strings, times and counts of each request."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ksana.engine.captured import CapturedPrompt
from ksana.errors import KsanaCode, RequestError
from ksana.text.detokenizer import Detokenizers, IncrementalDetokenizer
from ksana.text.stop_matcher import StopMatcher
from ksana.text.tokenizer import Tokenizer
from ksana.types.capture import CapturedPart
from ksana.types.output import FinishReason, RequestStats, TokenLogprobs
from ksana.types.request import FINISH_REASONS, Request, RequestStatus

logger = logging.getLogger(__name__)

_STOPPED = RequestStatus.FINISHED_STOPPED


@dataclass(slots=True)
class OutputDelta:
    """What a step added to a request. Fields as in :class:`ksana.types.output.RequestOutput`."""

    request_id: str
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    score: float | None = None
    error: RequestError | None = None
    stats: RequestStats | None = None
    captured: CapturedPrompt | None = None


class OutputProcessor:
    """Holds the text of every unfinished request, and drops it with the request's last delta.

    Attributes:
        texts: by request id.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._detokenizers = Detokenizers(tokenizer)
        self.texts: dict[str, RequestText] = {}

    def __len__(self) -> int:
        return len(self.texts)

    def add(self, request: Request) -> None:
        """Start a request, and those that wait for its prompt."""
        captured = CapturedPrompt(request.captures) if request.captures else None
        for sequence in request.sequences:
            self.texts[sequence.request_id] = RequestText(sequence, self._detokenizers, captured)

    def discard(self, request: Request) -> None:
        """Drop a request that did not start after all, and those that wait for its prompt."""
        for sequence in request.sequences:
            del self.texts[sequence.request_id]

    def capture(self, parts: Mapping[str, Sequence[CapturedPart]]) -> None:
        """Take in what a step has captured, by request id; some of them may have ended."""
        for request_id, own in parts.items():
            text = self.texts.get(request_id)
            if text is not None and text.captured is not None:
                text.captured.add(own)

    def finish(self, request: Request) -> OutputDelta:
        """The last delta of a request: flush what was held back, say why it ended. Drops its state."""
        text = self.texts.pop(request.request_id)
        text.flush()
        delta = text.take()
        # A stop string may be complete in the very token that also reached the length limit: the string wins.
        stopped = text.stop_string is not None
        delta.finish_reason = FinishReason.STOP if stopped else FINISH_REASONS[request.status]
        delta.stop_reason = text.stop_string if stopped else request.stop_reason
        delta.score = request.score
        delta.error = request.error or text.error
        if delta.error is not None:
            delta.finish_reason = FinishReason.ERROR
        delta.stats = text.stats(request)
        return delta


class RequestText:
    """The output of one request: its text up to a stop string, and what of it has not been delivered yet."""

    __slots__ = (
        "_delta",
        "_detokenizer",
        "_first_token_time",
        "_matcher",
        "_min_tokens",
        "_num_output_tokens",
        "_request_id",
        "captured",
        "error",
        "stop_string",
    )

    def __init__(self, request: Request, detokenizers: Detokenizers, captured: CapturedPrompt | None = None) -> None:
        sampling = request.sampling
        self.captured = captured
        self._request_id = request.request_id
        self._detokenizer: IncrementalDetokenizer = detokenizers.create(
            request.all_token_ids, sampling.skip_special_tokens
        )
        self._matcher = StopMatcher(sampling.stop, sampling.include_stop_str_in_output) if sampling.stop else None
        self._min_tokens = sampling.min_tokens
        self._delta = OutputDelta(request.request_id)
        self.stop_string: str | None = None
        self._first_token_time: float | None = None
        self._num_output_tokens = 0
        self.error: RequestError | None = None

    def push(self, request: Request, token_ids: list[int], logprobs: list[TokenLogprobs]) -> bool:
        """Take in new tokens; none for a request that has ended without output.

        Returns:
            True if the caller shall end the request: a stop string has cut text and tokens, or the text failed.
        """
        if not token_ids:
            return False
        if self._first_token_time is None:
            self._first_token_time = time.monotonic()
        hidden = 0
        if request.status is _STOPPED and not request.sampling.include_stop_str_in_output:
            hidden = 1  # the token that ended it is reported, but is not part of the text
        if self._matcher is not None:
            return self._push_until_stop(token_ids, logprobs, len(token_ids) - hidden)
        delta = self._delta
        delta.token_ids += token_ids
        if logprobs:
            delta.logprobs += logprobs
        self._num_output_tokens += len(token_ids)
        try:
            delta.text += self._detokenizer.push(token_ids[:-1] if hidden else token_ids)
        except Exception as error:
            self._fail(error)
            return True
        return False

    def flush(self) -> None:
        """Add the text that was held back."""
        if self.error is not None or self.stop_string is not None:
            return
        try:
            self._match(self._detokenizer.finish())
        except Exception as error:
            self._fail(error)
            return
        if self._matcher is not None and self.stop_string is None:
            self._delta.text += self._matcher.finish()

    def take(self) -> OutputDelta:
        """What has been added since the last call."""
        delta, self._delta = self._delta, OutputDelta(self._request_id)
        delta.captured = self.captured
        return delta

    def stats(self, request: Request) -> RequestStats:
        """Times and counts up to now."""
        return RequestStats(
            arrival_time=request.arrival_time,
            first_scheduled_time=request.first_scheduled_time,
            first_token_time=self._first_token_time,
            finished_time=time.monotonic(),
            num_prompt_tokens=request.num_prompt_tokens,
            num_cached_tokens=request.num_cached_tokens,
            num_output_tokens=self._num_output_tokens,
            num_preemptions=request.num_preemptions,
        )

    def _push_until_stop(self, token_ids: list[int], logprobs: list[TokenLogprobs], num_visible: int) -> bool:
        """Token by token, since those behind a stop string are dropped. Before ``min_tokens`` there is none."""
        for position, token in enumerate(token_ids):
            self._delta.token_ids.append(token)
            self._delta.logprobs += logprobs[position : position + 1]
            self._num_output_tokens += 1
            if position < num_visible:
                try:
                    text = self._detokenizer.push([token])
                    if self._num_output_tokens < self._min_tokens:
                        self._delta.text += text
                    else:
                        self._match(text)
                except Exception as error:
                    self._fail(error)
                    return True
                if self.stop_string is not None:
                    return True
        return False

    def _match(self, text: str) -> None:
        """Add text up to a stop string."""
        if self._matcher is not None:
            text, self.stop_string = self._matcher.push(text)
        self._delta.text += text

    def _fail(self, cause: Exception) -> None:
        """The tokenizer, maybe a plugin's, has raised."""
        logger.error("the tokenizer failed to decode for request %s", self._request_id, exc_info=cause)
        self.error = RequestError(
            "the tokenizer failed; the server's log says why",
            status=500,
            type="server_error",
            code="detokenization_failed",
            ksana_code=KsanaCode.RUNTIME_FAILED,
        )
