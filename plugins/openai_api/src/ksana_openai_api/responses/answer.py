"""One response, from its first event to the whole object."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ksana.errors import RequestError
from ksana.text.tokenizer import Tokenizer
from ksana.types.output import FinishReason, RequestOutput
from ksana_openai_api.answers import usage_of
from ksana_openai_api.choice import ChoiceReader
from ksana_openai_api.logprobs import LogprobFormat
from ksana_openai_api.responses.conversation import new_id
from ksana_openai_api.responses.items import Event
from ksana_openai_api.responses.output import ResponseOutput
from ksana_openai_api.responses.requests import ResponseRequest
from ksana_openai_api.turn import ChatTurn

if TYPE_CHECKING:
    from ksana.engine.async_engine import AsyncEngine


class Answer:
    """Reads the outputs of one request and tells of them, in events and as a response.

    Args:
        turn: that the request came to.
        is_kept: the response will be remembered.
    """

    def __init__(self, engine: AsyncEngine, turn: ChatTurn, body: ResponseRequest, *, is_kept: bool) -> None:
        self._engine = engine
        self._turn = turn
        self._reader: ChoiceReader | None = None
        self._logprobs = LogprobFormat(engine.tokenizer) if body.wants_logprobs else None
        self._num_logprobs = 0
        self._output = ResponseOutput()
        self.id = new_id("resp")
        self._response: dict[str, Any] = {
            "id": self.id,
            "object": "response",
            "created_at": int(time.time()),
            "completed_at": None,
            "status": "in_progress",
            "error": None,
            "incomplete_details": None,
            "model": engine.served_model_name,
            "output": [],
            "usage": None,
            "store": is_kept,
            **_settings(body, turn),
        }

    def begin(self) -> list[Event]:
        """The events before all output."""
        return [self._event("created"), self._event("in_progress")]

    def read(self, output: RequestOutput) -> list[Event]:
        """What is new in ``output``; the last one completes the response."""
        if self._reader is None:
            parser = self._turn.create_parser(self._engine, output.prompt_token_ids)
            self._reader = ChoiceReader(parser, parallel_calls=self._turn.tools.parallel)
        told = self._output.read(self._reader.read(output), self._new_logprobs(output))
        if output.finish_reason is not None:
            told += self._finish(output, output.finish_reason)
        return told

    def fail(self, error: RequestError) -> Event:
        """The event of an answer that goes wrong half-way."""
        known = "rate_limit_exceeded" if error.status == 429 else "server_error"
        self._response |= {
            "status": "failed",
            "error": {"code": known, "message": error.message},
            "output": self._output.as_json(),
        }
        return self._event("failed")

    def as_json(self) -> dict[str, Any]:
        """The response object so far."""
        return dict(self._response)

    def _finish(self, output: RequestOutput, reason: FinishReason) -> list[Event]:
        is_whole = reason is FinishReason.STOP
        told = self._output.end("completed" if is_whole else "incomplete")
        self._response |= {"output": self._output.as_json(), "usage": self._usage(output)}
        if reason is FinishReason.LENGTH:
            self._response |= {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}
            return [*told, self._event("incomplete")]
        if not is_whole:
            return [*told, self.fail(RequestError("the server has ended this answer early"))]
        self._response |= {"status": "completed", "completed_at": int(time.time())}
        return [*told, self._event("completed")]

    def _new_logprobs(self, output: RequestOutput) -> Sequence[Any]:
        if self._logprobs is None:
            return ()
        new = output.logprobs[self._num_logprobs :]
        self._num_logprobs = len(output.logprobs)
        found: Sequence[Any] = self._logprobs.chat(new)["content"]
        return found

    def _usage(self, output: RequestOutput) -> dict[str, Any]:
        usage = usage_of([(0, output)], per_prompt=1)
        reasoning = self._turn.parsers.reasoning
        num_reasoning = 0
        if reasoning is not None and self._reader is not None and self._reader.reasoning:
            num_reasoning = count_until(reasoning.end_token_text, output.token_ids, self._engine.tokenizer)
        return {
            "input_tokens": usage["prompt_tokens"],
            # Nothing is charged for writing, so it is not counted.
            "input_tokens_details": {**usage["prompt_tokens_details"], "cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": num_reasoning},
            "total_tokens": usage["total_tokens"],
        }

    def _event(self, name: str) -> Event:
        return {"type": f"response.{name}", "response": self.as_json()}


def count_until(end: str, token_ids: Sequence[int], tokenizer: Tokenizer) -> int:
    """How many tokens there are up to and with the first text ``end``; all of them if it does not come."""
    wanted = end.encode()
    tail = b""
    for number, token_id in enumerate(token_ids, 1):
        data = tokenizer.token_bytes(token_id)
        tail += tokenizer.decode([token_id], skip_special_tokens=False).encode() if data is None else data
        if wanted in tail:
            return number
        tail = tail[-len(wanted) :]
    return len(token_ids)


def _settings(body: ResponseRequest, turn: ChatTurn) -> dict[str, Any]:
    """What the request asked for, and what was made of it."""
    sampling = turn.draft.sampling
    text_format = body.text.format if body.text and body.text.format else None
    return {
        "background": False,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {"effort": body.reasoning.effort if body.reasoning else None, "summary": None},
        "safety_identifier": body.safety_identifier,
        "service_tier": "default",
        "temperature": sampling.temperature,
        "text": {
            "format": text_format.model_dump(by_alias=True, exclude_unset=True) if text_format else {"type": "text"}
        },
        "tool_choice": _choice(body),
        "tools": [tool.model_dump(include=_TOOL_FIELDS) for tool in body.tools or ()],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": sampling.top_p,
        "truncation": "disabled",
        "user": body.user,
    }


_TOOL_FIELDS = {"type", "name", "description", "parameters", "strict"}


def _choice(body: ResponseRequest) -> Any:
    choice = body.tool_choice
    if choice is None:
        return "auto"
    return choice if isinstance(choice, str) else choice.model_dump()
