"""Stands in for the model where scheduling is measured."""

from __future__ import annotations

import random
import time

from ksana.types.step import ModelRunnerOutput, SchedulerOutput


class NullExecutor:
    """Samples random tokens; ``seconds`` is the time it took for that."""

    def __init__(self, vocab_size: int, rng: random.Random) -> None:
        self._tokens = [[rng.randrange(vocab_size)] for _ in range(10_007)]
        self._num_sampled = 0
        self._missing: dict[str, int] = {}
        self.seconds = 0.0

    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        """A token for each request whose last known one is computed in this step."""
        started = time.perf_counter()
        for new in step.new_requests:
            self._missing[new.request_id] = len(new.token_ids) - new.num_computed_tokens
        sampled = {}
        for request_id, count in step.num_scheduled_tokens.items():
            self._missing[request_id] -= count
            if self._missing[request_id] == 0:
                self._missing[request_id] = 1
                sampled[request_id] = self._tokens[self._num_sampled % len(self._tokens)]
                self._num_sampled += 1
        for request_id in step.removed_request_ids:
            self._missing.pop(request_id)
        self.seconds += time.perf_counter() - started
        return ModelRunnerOutput(sampled)

    def reset(self) -> None:
        """Forget all requests."""
        self._missing.clear()
