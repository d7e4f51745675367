"""Turns a :class:`SchedulerOutput` into tensors, runs the model, and samples."""

from __future__ import annotations

import numpy as np
import torch

from ksana.connectors.base import WorkerConnector
from ksana.kernels.base import KernelBackend
from ksana.kernels.batch import AttentionBatch, KVCache, ModelInputs, StepContext
from ksana.models.base import Model
from ksana.types.kv import cdiv
from ksana.types.kv_transfer import ConnectorMetadata, KVConnectorOutput
from ksana.types.step import ModelRunnerOutput, NewRequestData, SchedulerOutput
from ksana.worker.captures import CaptureReader
from ksana.worker.input_batch import InputBatch
from ksana.worker.logits_processor import LogitsProcessors
from ksana.worker.token_sampler import TokenSampler


class ModelRunner:
    """Runs one model on one device.

    Args:
        model: loaded.
        backend: the device's operators.
        cache: allocated.
        max_num_seqs, max_model_len: size of the input batch.
        processors: change logits before tokens are drawn.
        connector: moves blocks between the cache and stores of blocks.
    """

    def __init__(
        self,
        model: Model,
        backend: KernelBackend,
        cache: KVCache,
        *,
        max_num_seqs: int,
        max_model_len: int,
        processors: LogitsProcessors | None = None,
        connector: WorkerConnector | None = None,
    ) -> None:
        self._model = model
        self._backend = backend
        self._cache = cache
        self._batch = InputBatch(max_num_seqs, max_model_len, cache.config)
        self._processors = LogitsProcessors() if processors is None else processors
        self._sampler = TokenSampler(backend, self._batch, self._processors)
        self._captures = CaptureReader(model, backend, self._batch)
        self._connector = connector
        self._last_layer = model.config.num_layers - 1

    @torch.inference_mode()
    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        """Compute the scheduled tokens, and sample for each request whose last token was among them."""
        connector, meta = self._connector, step.connector_metadata
        if connector is not None and meta is not None:
            output = self._compute_with_transfers(step, connector, meta)
        else:
            self._copy_blocks(step)
            output = self._compute(step)
        if connector is not None:
            sent, received = connector.get_finished()
            output.kv_connector_output = KVConnectorOutput(sent, received, connector.get_invalid_blocks())
        return output

    def reset(self) -> None:
        """Forget all requests: after a failed step nobody knows what the rows hold."""
        for request_id in list(self._batch.request_ids):
            self._remove(request_id)

    def _compute_with_transfers(
        self, step: SchedulerOutput, connector: WorkerConnector, meta: ConnectorMetadata
    ) -> ModelRunnerOutput:
        connector.handle_preemptions(meta)
        self._copy_blocks(step)  # before a load, too, may write to what they are copied from
        try:
            connector.start_load_kv(meta)
            output = self._compute(step)
        except Exception:
            # The requests end, and their blocks get other owners: nobody may be at them any more.
            connector.wait_for_layer_load(self._last_layer)
            connector.wait_for_save()
            raise
        connector.wait_for_save()
        return output

    def _compute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        self._apply_changes(step)
        if not step.num_scheduled_tokens:
            return ModelRunnerOutput()
        request_ids = list(step.num_scheduled_tokens)
        rows = self._batch.rows(request_ids)
        counts = np.fromiter(step.num_scheduled_tokens.values(), dtype=np.int64, count=len(rows))
        query_starts = np.zeros(len(rows) + 1, dtype=np.int64)
        np.cumsum(counts, out=query_starts[1:])
        num_drafts = self._batch.place_drafts(step.draft_token_ids, rows)
        known = self._batch.num_tokens[rows] + num_drafts
        complete = np.flatnonzero(self._batch.num_computed[rows] + counts == known)
        output_rows = sampled_rows = _last_rows(query_starts[complete + 1], num_drafts[complete] + 1)
        captures = self._captures.plan(rows, counts, query_starts) if self._captures else []
        if captures:
            output_rows = np.unique(np.concatenate([sampled_rows, *(part.rows for part in captures)]))
        inputs, context = self._prepare(rows, counts, query_starts, output_rows)
        if self._connector is not None and step.connector_metadata is not None:
            self._await_loads(self._connector, context)
        hidden = self._model.forward(inputs, context)
        self._batch.num_computed[rows] += counts
        output = ModelRunnerOutput()
        if captures:
            self._captures.read(captures, hidden, output_rows, output)
            hidden = hidden[torch.from_numpy(np.searchsorted(output_rows, sampled_rows)).to(hidden.device)]
        if len(complete):
            self._sample(self._model.final_norm(hidden), rows[complete], num_drafts[complete], output)
        return output

    def _sample(
        self, normed: torch.Tensor, rows: np.ndarray, num_drafts: np.ndarray, output: ModelRunnerOutput
    ) -> None:
        if self._sampler.needs_logits:
            self._sampler.sample(self._model.compute_logits(normed), rows, num_drafts, output)
        else:
            self._sampler.take(*self._model.likeliest(normed), rows, num_drafts, output)

    def _await_loads(self, connector: WorkerConnector, context: StepContext) -> None:
        """What the step loads synchronously must be there before it is read: now, or layer by layer."""
        if connector.is_layerwise:
            context.layer_transfers = connector
        else:
            connector.wait_for_layer_load(self._last_layer)

    def _add(self, request: NewRequestData) -> None:
        self._batch.add(request)
        self._processors.add(request)
        self._captures.add(request)

    def _remove(self, request_id: str) -> None:
        self._batch.remove(request_id)
        self._processors.remove(request_id)
        self._captures.remove(request_id)

    def _apply_changes(self, step: SchedulerOutput) -> None:
        for request_id in step.removed_request_ids:
            self._remove(request_id)
        for request in step.new_requests:
            self._add(request)
        for request_id, tokens in step.chosen_token_ids.items():
            self._batch.extend(request_id, tokens)
            self._processors.accept_all(request_id, tokens)
        for request in step.new_beams:
            self._remove(request.request_id)
            self._add(request)
        for request_id, update in step.block_table_updates.items():
            self._batch.update_block_table(request_id, update)

    def _copy_blocks(self, step: SchedulerOutput) -> None:
        if step.block_copies:
            self._backend.copy_blocks(self._cache, step.block_copies)

    def _prepare(
        self, rows: np.ndarray, counts: np.ndarray, query_starts: np.ndarray, output_rows: np.ndarray
    ) -> tuple[ModelInputs, StepContext]:
        batch, device = self._batch, self._backend.device
        starts = batch.num_computed[rows]
        row_of_token = np.repeat(rows, counts)
        positions = np.arange(query_starts[-1]) + np.repeat(starts - query_starts[:-1], counts)
        inputs = ModelInputs(
            token_ids=torch.from_numpy(batch.token_ids[row_of_token, positions]).to(device),
            positions=torch.from_numpy(positions).to(device),
            output_rows=torch.from_numpy(output_rows).to(device),
            embedding_rows=self._embedding_rows(rows, starts, query_starts) if batch.embeddings else [],
        )
        attention = []
        longest = int((starts + counts).max())
        for group, tables in zip(self._cache.config.groups, batch.block_tables, strict=True):
            size = group.spec.block_size
            slots = tables[row_of_token, positions // size] * size + positions % size
            attention_batch = AttentionBatch(
                query_starts=query_starts,
                context_lens=starts,
                block_tables=tables[rows, : cdiv(longest, size)],
                slot_mapping=slots,
                block_size=size,
                sliding_window=group.sliding_window,
            )
            attention.append(self._backend.build_attention_metadata(attention_batch))
        return inputs, StepContext(self._model.rotary_tables(inputs.positions), attention, self._cache)

    def _embedding_rows(
        self, rows: np.ndarray, starts: np.ndarray, query_starts: np.ndarray
    ) -> list[tuple[int, torch.Tensor]]:
        """The parts of the requests' embeddings that fall into this step, and where in the batch they go."""
        found = []
        for row, start, first, last in zip(rows, starts, query_starts[:-1], query_starts[1:], strict=True):
            for embedding in self._batch.embeddings.get(self._batch.request_ids[row], ()):
                begin = max(embedding.position, start)
                end = min(embedding.position + len(embedding.rows), start + last - first)
                if begin < end:
                    part = embedding.rows[begin - embedding.position : end - embedding.position]
                    found.append((int(first + begin - start), torch.from_numpy(part).to(self._backend.device)))
        return found


def _last_rows(ends: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """The last ``counts[i]`` rows before each ``ends[i]``, int64, ascending like ``ends``."""
    starts: np.ndarray = ends - counts
    if counts.sum() == len(counts):
        return starts
    rows: np.ndarray = np.arange(counts.sum()) + np.repeat(starts - (np.cumsum(counts) - counts), counts)
    return rows
