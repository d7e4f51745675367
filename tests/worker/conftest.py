"""A small real model behind a real scheduler, with its logits kept."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from ksana.kernels.base import KernelBackend
from ksana.kernels.batch import ModelInputs, StepContext
from ksana.kernels.cpu.backend import CPUBackend
from ksana.kv import KVCacheManager
from ksana.models.llama import LlamaModel
from ksana.scheduling import Scheduler
from ksana.testing.random_llama import random_llama
from ksana.types.config import CacheConfig, KernelConfig, SchedulerConfig
from ksana.types.request import Request
from ksana.types.sampling import SamplingParams
from ksana.types.step import ModelRunnerOutput
from ksana.worker.cache_size import plan_kv_cache
from ksana.worker.model_runner import ModelRunner

GREEDY = SamplingParams(temperature=0.0)


class RecordingModel:
    """A model that keeps the logits of its last step."""

    def __init__(self, model: LlamaModel) -> None:
        self.config = model.config
        self._model = model
        self.logits = torch.empty(0)

    def load_weight(self, name: str, tensor: torch.Tensor) -> bool:
        return self._model.load_weight(name, tensor)

    def finish_loading(self) -> list[str]:
        return self._model.finish_loading()

    def rotary_tables(self, positions: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return self._model.rotary_tables(positions)

    def forward(self, inputs: ModelInputs, context: StepContext) -> torch.Tensor:
        return self._model.forward(inputs, context)

    def final_norm(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._model.final_norm(hidden)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        self.logits = self._model.compute_logits(hidden)
        return self.logits

    def likeliest(self, hidden: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
        found = self._model.likeliest(hidden)
        likeliest, finite = KernelBackend().argmax(self.compute_logits(hidden))
        assert found[0].tolist() == likeliest.tolist()
        assert found[1].tolist() == finite.tolist()
        return found


class Engine:
    """Scheduler and model runner in lockstep; ``logits`` holds, by request, the row of every token drawn."""

    def __init__(
        self,
        windows: tuple[int | None, ...] = (None, None),
        num_blocks: int = 100,
        block_size: int = 4,
        caching: bool = True,
        **config: Any,
    ) -> None:
        backend = CPUBackend(KernelConfig(threads=1))
        model, self.weights = random_llama(backend, sliding_windows=windows, num_layers=len(windows))
        self.model = RecordingModel(model)
        kv_config = plan_kv_cache(
            model.config,
            CacheConfig(num_blocks=num_blocks, block_size=block_size),
            SchedulerConfig(**config),
            max_model_len=256,
            available_memory=backend.available_memory,
        )
        self.kv = KVCacheManager(kv_config, enable_prefix_caching=caching)
        self.scheduler = Scheduler(SchedulerConfig(**config), self.kv)
        self.runner = ModelRunner(
            self.model, backend, backend.allocate_kv_cache(kv_config), max_num_seqs=16, max_model_len=256
        )
        self.logits: dict[str, list[np.ndarray]] = {}
        self._ids = itertools.count()

    def add(
        self, tokens: Sequence[int], max_tokens: int = 6, sampling: SamplingParams = GREEDY, **options: Any
    ) -> Request:
        limit = len(tokens) + max_tokens
        request = Request(f"r{next(self._ids)}", list(tokens), sampling, max_total_tokens=limit, **options)
        self.scheduler.add_request(request)
        return request

    def step(self) -> ModelRunnerOutput:
        step = self.scheduler.schedule()
        output = self.runner.execute(step)
        if not output.broken_request_ids:
            for row, request_id in enumerate(output.sampled_token_ids):
                self.logits.setdefault(request_id, []).append(self.model.logits[row].numpy().copy())
        self.scheduler.update_from_output(step, output)
        return output

    def run(self) -> None:
        while self.scheduler.has_work():
            self.step()


@pytest.fixture
def make_engine() -> Iterator[Callable[..., Engine]]:
    before = torch.get_num_threads()
    yield Engine
    torch.set_num_threads(before)
