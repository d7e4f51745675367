"""From tokens to text: detokenisation, stop strings, times and counts of each request."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from ksana.errors import RequestError
from ksana.text.detokenizer import IncrementalDetokenizer, create_detokenizer
from ksana.text.stop_matcher import StopMatcher
from ksana.text.tokenizer import Tokenizer
from ksana.types.output import FinishReason, RequestStats, TokenLogprobs
from ksana.types.request import FINISH_REASONS, Request, RequestStatus


@dataclass(slots=True)
class OutputDelta:
    """What a step added to a request. Fields as in :class:`ksana.types.output.RequestOutput`."""

    request_id: str
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    error: RequestError | None = None
    stats: RequestStats | None = None


class OutputProcessor:
    """Holds the text state of every unfinished request, and drops it with the request's last delta."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._states: dict[str, _TextState] = {}

    def __len__(self) -> int:
        return len(self._states)

    def add(self, request: Request) -> None:
        """Start a request."""
        self._states[request.request_id] = _TextState(request, self._tokenizer)

    def push(self, request: Request, token_ids: list[int], logprobs: list[TokenLogprobs]) -> OutputDelta:
        """Turn new tokens into text.

        A stop string sets ``stop_reason`` and cuts text and tokens behind it; the caller then ends the request.
        """
        state = self._states[request.request_id]
        if state.first_token_time is None and token_ids:
            state.first_token_time = time.monotonic()
        delta = OutputDelta(request.request_id)
        state.push(request, token_ids, delta)
        delta.logprobs = logprobs[: len(delta.token_ids)]
        return delta

    def finish(self, request: Request, delta: OutputDelta | None = None) -> OutputDelta:
        """Complete the last delta of a request: flush what was held back, say why it ended. Drops its state."""
        state = self._states.pop(request.request_id)
        delta = delta or OutputDelta(request.request_id)
        if delta.stop_reason is None:
            state.flush(delta)
            delta.stop_reason = delta.stop_reason or request.stop_reason
        # A stop string may be complete in the very token that also reached the length limit: the string wins.
        stopped = isinstance(delta.stop_reason, str)
        delta.finish_reason = FinishReason.STOP if stopped else FINISH_REASONS[request.status]
        delta.error = request.error
        delta.stats = state.stats(request)
        return delta


class _TextState:
    """Text side of one request."""

    __slots__ = ("detokenizer", "first_token_time", "matcher", "num_output_tokens")

    def __init__(self, request: Request, tokenizer: Tokenizer) -> None:
        sampling = request.sampling
        self.detokenizer: IncrementalDetokenizer = create_detokenizer(
            tokenizer, request.all_token_ids, sampling.skip_special_tokens
        )
        self.matcher = StopMatcher(sampling.stop, sampling.include_stop_str_in_output)
        self.first_token_time: float | None = None
        self.num_output_tokens = 0

    def push(self, request: Request, token_ids: list[int], delta: OutputDelta) -> None:
        visible = len(token_ids)
        if request.status is RequestStatus.FINISHED_STOPPED and not request.sampling.include_stop_str_in_output:
            visible -= 1  # the token that ended it is reported, but is not part of the text
        for position, token in enumerate(token_ids):
            delta.token_ids.append(token)
            self.num_output_tokens += 1
            if position < visible:
                result = self.matcher.push(self.detokenizer.push([token]))
                delta.text += result.text_to_emit
                if result.matched is not None:
                    delta.stop_reason = result.matched
                    return

    def flush(self, delta: OutputDelta) -> None:
        result = self.matcher.push(self.detokenizer.finish())
        delta.text += result.text_to_emit
        if result.matched is None:
            delta.text += self.matcher.finish()
        delta.stop_reason = result.matched

    def stats(self, request: Request) -> RequestStats:
        return RequestStats(
            arrival_time=request.arrival_time,
            first_scheduled_time=request.first_scheduled_time,
            first_token_time=self.first_token_time,
            finished_time=time.monotonic(),
            num_prompt_tokens=request.num_prompt_tokens,
            num_cached_tokens=request.num_cached_tokens,
            num_output_tokens=self.num_output_tokens,
            num_preemptions=request.num_preemptions,
        )
