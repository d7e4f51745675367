"""From tokens to text: detokenisation, stop strings, times and counts of each request."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from ksana.errors import KsanaCode, RequestError
from ksana.text.detokenizer import IncrementalDetokenizer, create_detokenizer
from ksana.text.stop_matcher import StopMatcher
from ksana.text.tokenizer import Tokenizer
from ksana.types.output import FinishReason, RequestStats, TokenLogprobs
from ksana.types.request import FINISH_REASONS, Request, RequestStatus

logger = logging.getLogger(__name__)


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

    def discard(self, request: Request) -> None:
        """Drop a request that did not start after all."""
        del self._states[request.request_id]

    def push(self, request: Request, token_ids: list[int], logprobs: list[TokenLogprobs]) -> bool:
        """Take in new tokens.

        Returns:
            True if the caller shall end the request: a stop string has cut text and tokens, or the text failed.
        """
        return self._states[request.request_id].push(request, token_ids, logprobs)

    def take(self, request: Request) -> OutputDelta:
        """What has been added to a request since the last call."""
        return self._states[request.request_id].take()

    def finish(self, request: Request) -> OutputDelta:
        """The last delta of a request: flush what was held back, say why it ended. Drops its state."""
        state = self._states.pop(request.request_id)
        state.flush()
        delta = state.take()
        # A stop string may be complete in the very token that also reached the length limit: the string wins.
        stopped = isinstance(delta.stop_reason, str)
        delta.finish_reason = FinishReason.STOP if stopped else FINISH_REASONS[request.status]
        delta.stop_reason = delta.stop_reason if stopped else request.stop_reason
        delta.error = request.error or state.error
        if delta.error is not None:
            delta.finish_reason = FinishReason.ERROR
        delta.stats = state.stats(request)
        return delta


class _TextState:
    """Text side of one request."""

    __slots__ = (
        "_delta",
        "_detokenizer",
        "_first_token_time",
        "_matcher",
        "_num_output_tokens",
        "_request_id",
        "error",
    )

    def __init__(self, request: Request, tokenizer: Tokenizer) -> None:
        sampling = request.sampling
        self._request_id = request.request_id
        self._detokenizer: IncrementalDetokenizer = create_detokenizer(
            tokenizer, request.all_token_ids, sampling.skip_special_tokens
        )
        self._matcher = StopMatcher(sampling.stop, sampling.include_stop_str_in_output)
        self._delta = OutputDelta(request.request_id)
        self._first_token_time: float | None = None
        self._num_output_tokens = 0
        self.error: RequestError | None = None

    def push(self, request: Request, token_ids: list[int], logprobs: list[TokenLogprobs]) -> bool:
        if self._first_token_time is None and token_ids:
            self._first_token_time = time.monotonic()
        visible = len(token_ids)
        if request.status is RequestStatus.FINISHED_STOPPED and not request.sampling.include_stop_str_in_output:
            visible -= 1  # the token that ended it is reported, but is not part of the text
        for position, token in enumerate(token_ids):
            self._delta.token_ids.append(token)
            self._delta.logprobs += logprobs[position : position + 1]
            self._num_output_tokens += 1
            if position < visible and self._add_text(partial(self._detokenizer.push, [token])):
                return True
        return False

    def flush(self) -> None:
        if self.error is None and self._delta.stop_reason is None and not self._add_text(self._detokenizer.finish):
            self._delta.text += self._matcher.finish()

    def take(self) -> OutputDelta:
        delta, self._delta = self._delta, OutputDelta(self._request_id)
        return delta

    def stats(self, request: Request) -> RequestStats:
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

    def _add_text(self, decode: Callable[[], str]) -> bool:
        """Add text up to a stop string; True if there was one, or if the tokenizer, maybe a plugin's, has failed."""
        try:
            text = decode()
        except Exception:
            logger.exception("the tokenizer failed to decode for request %s", self._request_id)
            self.error = RequestError(
                "the tokenizer failed; the server's log says why",
                status=500,
                type="server_error",
                code="detokenization_failed",
                ksana_code=KsanaCode.RUNTIME_FAILED,
            )
            return True
        result = self._matcher.push(text)
        self._delta.text += result.text_to_emit
        self._delta.stop_reason = result.matched
        return result.matched is not None
