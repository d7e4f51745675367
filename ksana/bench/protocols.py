"""The APIs that a benchmark can speak: what a request looks like in each, and how to read its answer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import orjson

from ksana.bench.answers import (
    AnswerReader,
    ChatAnswer,
    CompletionAnswer,
    GenerateAnswer,
    NulFrames,
    SseFrames,
    WholeBody,
)
from ksana.bench.options import Api, SamplingOptions
from ksana.bench.workload import BenchRequest, Prompt
from ksana.errors import UsageError


@dataclass(frozen=True, slots=True)
class Protocol(ABC):
    """One API.

    Attributes:
        sampling: what every request asks for, with ``ignore_eos`` decided.
        model: name to send, if any.
    """

    sampling: SamplingOptions
    model: str | None

    name: ClassVar[Api]
    path: ClassVar[str]
    takes_token_ids: ClassVar[bool] = True
    takes_messages: ClassVar[bool] = True

    def encode(self, request: BenchRequest) -> bytes:
        """The body of ``request``.

        Raises:
            UsageError: this API has no place for such a prompt.
        """
        self._check(request.prompt)
        return orjson.dumps({**self._body(request), **self.sampling.extra_body})

    @abstractmethod
    def reader(self) -> AnswerReader:
        """A new reader for one answer."""

    @abstractmethod
    def _body(self, request: BenchRequest) -> dict[str, Any]:
        """The fields of a request."""

    def _check(self, prompt: Prompt) -> None:
        if is_messages(prompt) and not self.takes_messages:
            raise UsageError(f"--api {self.name} takes no messages, which the file of prompts has; use --api chat")
        if is_token_ids(prompt) and not self.takes_token_ids:
            raise UsageError(
                f"--api {self.name} takes no token ids, which the file of prompts has; use --api completions"
            )

    def _openai_fields(self, request: BenchRequest) -> dict[str, Any]:
        sampling = self.sampling
        optional = {
            "top_k": sampling.top_k,
            "top_p": sampling.top_p,
            "stop": list(sampling.stop) or None,
            "stop_token_ids": list(sampling.stop_token_ids) or None,
            # Servers that do not know this field may refuse it, so it is sent only where it says something.
            "ignore_eos": sampling.ignore_eos or None,
            "stream_options": {"include_usage": True} if sampling.stream else None,
        }
        return {
            "model": self.model,
            "max_tokens": request.max_tokens,
            "temperature": sampling.temperature,
            "stream": sampling.stream,
            **{name: value for name, value in optional.items() if value is not None},
        }


class Completions(Protocol):
    """``POST /v1/completions``."""

    name = "completions"
    path = "/v1/completions"
    takes_messages = False

    def reader(self) -> AnswerReader:
        return CompletionAnswer(SseFrames() if self.sampling.stream else WholeBody())

    def _body(self, request: BenchRequest) -> dict[str, Any]:
        return {"prompt": request.prompt, **self._openai_fields(request)}


class Chat(Protocol):
    """``POST /v1/chat/completions``; a text becomes one message of the user."""

    name = "chat"
    path = "/v1/chat/completions"
    takes_token_ids = False

    def reader(self) -> AnswerReader:
        return ChatAnswer(SseFrames() if self.sampling.stream else WholeBody())

    def _body(self, request: BenchRequest) -> dict[str, Any]:
        prompt = request.prompt
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        return {"messages": messages, **self._openai_fields(request)}


class Generate(Protocol):
    """``POST /generate``, the native API of Ksana and KsanaLLM."""

    name = "generate"
    path = "/generate"

    def reader(self) -> AnswerReader:
        return GenerateAnswer(NulFrames() if self.sampling.stream else WholeBody())

    def _body(self, request: BenchRequest) -> dict[str, Any]:
        sampling = self.sampling
        greedy = sampling.temperature == 0
        config: dict[str, Any] = {
            "max_new_tokens": request.max_tokens,
            # The API is greedy with a top-k of 1, whatever the temperature, and that is its default.
            "topk": sampling.top_k if sampling.top_k is not None else int(greedy),
            "temperature": 1.0 if greedy else sampling.temperature,
            "ignore_eos": bool(sampling.ignore_eos),
        }
        if sampling.top_p is not None:
            config["topp"] = sampling.top_p
        if sampling.stop:
            config["stop_strings"] = list(sampling.stop)
        if sampling.stop_token_ids:
            config["stop_token_ids"] = list(sampling.stop_token_ids)
        return {**self._prompt_field(request.prompt), "sampling_config": config, "stream": sampling.stream}

    @staticmethod
    def _prompt_field(prompt: Prompt) -> dict[str, Any]:
        if isinstance(prompt, str):
            return {"prompt": prompt}
        return {"messages" if is_messages(prompt) else "input_tokens": prompt}


PROTOCOLS: dict[Api, type[Protocol]] = {kind.name: kind for kind in (Completions, Chat, Generate)}


def is_token_ids(prompt: Prompt) -> bool:
    """Whether ``prompt`` is a list of token ids."""
    return not isinstance(prompt, str) and isinstance(prompt[0], int)


def is_messages(prompt: Prompt) -> bool:
    """Whether ``prompt`` is a list of chat messages."""
    return not isinstance(prompt, str) and isinstance(prompt[0], dict)
