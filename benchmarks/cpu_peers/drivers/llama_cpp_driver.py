"""llama.cpp, through its C API: prompts packed into batches, then one batch a step with a token of every sequence."""

from __future__ import annotations

import ctypes
from typing import Any

import llama_cpp as llama
import numpy as np
from protocol import Generate, serve

_QUIET = llama.llama_log_callback(lambda level, text, user_data: None)  # must live as long as the library


class Engine:
    """A model, and a context with room for all sequences.

    Args:
        settings: ``model``, ``threads``, ``max_num_batched_tokens``, ``max_num_seqs``, ``num_cache_tokens``.
    """

    def __init__(self, settings: dict[str, Any]) -> None:
        llama.llama_log_set(_QUIET, ctypes.c_void_p(0))
        llama.llama_backend_init()
        model = llama.llama_model_load_from_file(settings["model"].encode(), llama.llama_model_default_params())
        if not model:
            raise RuntimeError(f"llama.cpp cannot load {settings['model']}")
        parameters = llama.llama_context_default_params()
        parameters.n_ctx = settings["num_cache_tokens"]
        parameters.n_batch = settings["max_num_batched_tokens"]
        parameters.n_seq_max = settings["max_num_seqs"]
        parameters.n_threads = parameters.n_threads_batch = settings["threads"]
        parameters.kv_unified = True
        self._context = llama.llama_init_from_model(model, parameters)
        if not self._context:
            raise RuntimeError("llama.cpp cannot create a context")
        self._vocab_size = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(model))
        self._capacity = settings["max_num_batched_tokens"]
        self._batch = llama.llama_batch_init(self._capacity, 0, 1)

    def generate(self, prompts: list[list[int]], tokens: int) -> list[list[int]]:
        llama.llama_memory_clear(llama.llama_get_memory(self._context), True)
        outputs = self._prefill(prompts)
        for step in range(tokens - 1):
            rows = [
                (output[-1], len(prompt) + step, sequence, True)
                for sequence, (prompt, output) in enumerate(zip(prompts, outputs, strict=True))
            ]
            self._decode(rows)
            for sequence, output in enumerate(outputs):
                output.append(self._greedy(sequence))
        return outputs

    def _prefill(self, prompts: list[list[int]]) -> list[list[int]]:
        """The first token of every prompt; as many prompts share a batch as fit."""
        outputs: list[list[int]] = []
        rows: list[tuple[int, int, int, bool]] = []
        last_rows: list[int] = []
        for sequence, prompt in enumerate(prompts):
            if len(rows) + len(prompt) > self._capacity:
                self._decode(rows)
                outputs += [[self._greedy(row)] for row in last_rows]
                rows, last_rows = [], []
            rows += [(token, place, sequence, place == len(prompt) - 1) for place, token in enumerate(prompt)]
            last_rows.append(len(rows) - 1)
        self._decode(rows)
        return outputs + [[self._greedy(row)] for row in last_rows]

    def _decode(self, rows: list[tuple[int, int, int, bool]]) -> None:
        """Run rows of (token, position, sequence, whether its logits are wanted)."""
        batch = self._batch
        for index, (token, position, sequence, wanted) in enumerate(rows):
            batch.token[index] = token
            batch.pos[index] = position
            batch.n_seq_id[index] = 1
            batch.seq_id[index][0] = sequence
            batch.logits[index] = wanted
        batch.n_tokens = len(rows)
        if status := llama.llama_decode(self._context, batch):
            raise RuntimeError(f"llama_decode failed with {status}")

    def _greedy(self, row: int) -> int:
        logits = llama.llama_get_logits_ith(self._context, row)
        return int(np.ctypeslib.as_array(logits, shape=(self._vocab_size,)).argmax())


def load(settings: dict[str, Any]) -> Generate:
    return Engine(settings).generate


if __name__ == "__main__":
    serve(load)
