"""The parts that answers of both kinds are made of."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ksana.types.output import FinishReason, RequestOutput
from ksana_openai_api.requests import StreamOptions


@dataclass(frozen=True, slots=True)
class Envelope:
    """What is the same in every chunk of an answer."""

    id: str
    model: str
    created: int

    @classmethod
    def create(cls, prefix: str, model: str) -> Envelope:
        """A new one, its id starting with ``prefix``."""
        return cls(f"{prefix}-{uuid.uuid4().hex}", model, int(time.time()))

    def wrap(self, kind: str, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        """A whole object of the API, of type ``kind``."""
        head = {"id": self.id, "object": kind, "created": self.created, "model": self.model}
        return {**head, "choices": choices, **more}


def usage_of(outputs: Iterable[tuple[int, RequestOutput]], per_prompt: int) -> dict[str, Any]:
    """Token counts.

    Args:
        outputs: by the index of the choice.
        per_prompt: choices that share a prompt, which counts once.
    """
    prompts: dict[int, RequestOutput] = {}
    completion = 0
    for index, output in outputs:
        prompts.setdefault(index // per_prompt, output)
        completion += len(output.token_ids)
    prompt = sum(len(output.prompt_token_ids) for output in prompts.values())
    cached = sum(output.stats.num_cached_tokens for output in prompts.values())
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def finish_of(reason: FinishReason | None) -> str | None:
    """The ``finish_reason`` of a choice."""
    return None if reason is None else reason.value


class StreamUsage:
    """Decides where token counts appear in a stream, and keeps them: the latest output of every choice.

    Args:
        options: of the request.
        per_prompt: choices that share a prompt.
    """

    def __init__(self, options: StreamOptions | None, per_prompt: int) -> None:
        self._per_prompt = per_prompt
        self.at_end = bool(options and options.include_usage)
        self._always = self.at_end and bool(options and options.continuous_usage_stats)
        self._latest: dict[int, RequestOutput] = {}

    @property
    def differs_by_chunk(self) -> bool:
        """True if :meth:`fields` has something else to say for every chunk."""
        return self._always

    def update(self, index: int, output: RequestOutput) -> None:
        """Take note of the latest output of choice ``index``."""
        self._latest[index] = output

    def fields(self) -> dict[str, Any]:
        """The fields to add to a chunk that has choices."""
        if not self.at_end:
            return {}
        return {"usage": self.total() if self._always else None}

    def total(self) -> dict[str, Any]:
        """The counts so far."""
        return usage_of(sorted(self._latest.items(), key=lambda item: item[0]), self._per_prompt)
