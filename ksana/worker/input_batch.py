"""The worker's persistent picture of the running requests, one row each, changed by what the scheduler says is new."""

from __future__ import annotations

import numpy as np

from ksana.errors import UsageError
from ksana.types.kv import KVCacheConfig, cdiv
from ksana.types.request import InputEmbedding
from ksana.types.step import BlockTableUpdate, NewRequestData
from ksana.worker.random import uniforms
from ksana.worker.sampler import SamplingRows

_LARGEST_INT64 = 2**63 - 1


class InputBatch:
    """Arrays with a row for each running request. Rows are dense: the last one moves into a gap.

    Args:
        max_num_seqs: most rows.
        max_model_len: most tokens of a row.
        kv: block size, and how many groups of block tables there are.

    Raises:
        UsageError: there is no memory for so many rows.

    Attributes:
        request_ids: by row.
        token_ids: int64 [max_num_seqs, max_model_len], prompt and generated tokens.
        num_tokens, num_computed: int64 [max_num_seqs].
        block_tables: one int64 [max_num_seqs, blocks of the longest request] a group.
        num_logprobs: int64 [max_num_seqs], likeliest tokens to report; -1 for no log probabilities at all.
        num_candidates: int64 [max_num_seqs], tokens that may follow a beam to report; 0 for rows that are no beams.
        embeddings: by request, for those that have some.
    """

    def __init__(self, max_num_seqs: int, max_model_len: int, kv: KVCacheConfig) -> None:
        blocks = cdiv(max_model_len, kv.block_size)
        self.request_ids: list[str] = []
        self._row_of: dict[str, int] = {}
        try:
            self.token_ids = np.zeros((max_num_seqs, max_model_len), dtype=np.int64)
            self.block_tables = [np.zeros((max_num_seqs, blocks), dtype=np.int64) for _ in kv.groups]
        except MemoryError:
            raise UsageError(
                f"--max-num-seqs {max_num_seqs}: there is no memory for tables of as many requests of up to "
                f"{max_model_len} tokens; lower it, or --max-model-len"
            ) from None
        self.num_tokens = np.zeros(max_num_seqs, dtype=np.int64)
        self.num_computed = np.zeros(max_num_seqs, dtype=np.int64)
        self.embeddings: dict[str, tuple[InputEmbedding, ...]] = {}
        self._seeds = np.zeros(max_num_seqs, dtype=np.uint64)
        self._temperatures = np.zeros(max_num_seqs, dtype=np.float32)
        self._top_ks = np.zeros(max_num_seqs, dtype=np.int64)
        self._top_ps = np.ones(max_num_seqs, dtype=np.float32)
        self._min_ps = np.zeros(max_num_seqs, dtype=np.float32)
        self.num_logprobs = np.zeros(max_num_seqs, dtype=np.int64)
        self.num_candidates = np.zeros(max_num_seqs, dtype=np.int64)
        self._demanding: set[str] = set()

    def __len__(self) -> int:
        return len(self.request_ids)

    @property
    def all_greedy(self) -> bool:
        """True if the likeliest token is all that any request asks of its logits."""
        return not self._demanding

    def rows(self, request_ids: list[str]) -> np.ndarray:
        """int64 rows of those requests."""
        row_of = self._row_of
        return np.fromiter((row_of[i] for i in request_ids), dtype=np.int64, count=len(request_ids))

    def add(self, request: NewRequestData) -> None:
        """Append a row."""
        row = len(self.request_ids)
        self.request_ids.append(request.request_id)
        self._row_of[request.request_id] = row
        count = len(request.token_ids)
        self.token_ids[row, :count] = request.token_ids
        self.num_tokens[row] = count
        self.num_computed[row] = request.num_computed_tokens
        self._write_blocks(row, 0, request.block_ids)
        if request.embeddings:
            self.embeddings[request.request_id] = request.embeddings
        sampling = request.sampling
        self._seeds[row] = request.seed
        self._temperatures[row] = 0.0 if sampling.is_greedy else sampling.temperature
        self._top_ks[row] = min(max(0, sampling.top_k), _LARGEST_INT64)  # any integer may be asked for
        self._top_ps[row] = sampling.top_p
        self._min_ps[row] = sampling.min_p
        self.num_logprobs[row] = -1 if sampling.logprobs is None else sampling.logprobs
        if not sampling.is_greedy or sampling.logprobs is not None or sampling.num_beams > 1:
            self._demanding.add(request.request_id)
        # As many as there are beams shall be left if all that would end a text are taken out.
        self.num_candidates[row] = sampling.num_beams + len(request.stop_token_ids) if sampling.num_beams > 1 else 0

    def remove(self, request_id: str) -> None:
        """Drop a row; the last row takes its place. Does nothing if the request has none."""
        row = self._row_of.pop(request_id, None)
        if row is None:
            return
        self.embeddings.pop(request_id, None)
        self._demanding.discard(request_id)
        last = len(self.request_ids) - 1
        if row != last:
            moved = self.request_ids[last]
            self.request_ids[row] = moved
            self._row_of[moved] = row
            count = self.num_tokens[last]
            self.token_ids[row, :count] = self.token_ids[last, :count]
            columns: tuple[np.ndarray, ...] = (
                self.num_tokens,
                self.num_computed,
                *self.block_tables,
                self._seeds,
                self._temperatures,
                self._top_ks,
                self._top_ps,
                self._min_ps,
                self.num_logprobs,
                self.num_candidates,
            )
            for column in columns:
                column[row] = column[last]
        self.request_ids.pop()

    def update_block_table(self, request_id: str, update: BlockTableUpdate) -> None:
        """Replace the tail of a request's block tables."""
        self._write_blocks(self._row_of[request_id], update.first_index, update.block_ids)

    def extend(self, request_id: str, tokens: list[int]) -> None:
        """Tokens that were chosen elsewhere go behind those of a request; nothing of them is computed yet."""
        row = self._row_of[request_id]
        start = self.num_tokens[row]
        self.token_ids[row, start : start + len(tokens)] = tokens
        self.num_tokens[row] = start + len(tokens)

    def place_drafts(self, drafts: dict[str, list[int]], rows: np.ndarray) -> np.ndarray:
        """Write drafted tokens behind the known ones, where they do not count yet.

        Args:
            drafts: by request id.
            rows: int64 [n].

        Returns:
            int64 [n], how many each of ``rows`` has.
        """
        num_drafts = np.zeros(len(self.token_ids), dtype=np.int64)
        for request_id, tokens in drafts.items():
            row = self._row_of[request_id]
            start = self.num_tokens[row]
            self.token_ids[row, start : start + len(tokens)] = tokens
            num_drafts[row] = len(tokens)
        found: np.ndarray = num_drafts[rows]
        return found

    def drafts(self, row: int, count: int) -> np.ndarray:
        """The ``count`` drafted tokens of a row, int64."""
        start = self.num_tokens[row]
        drafted: np.ndarray = self.token_ids[row, start : start + count]
        return drafted

    def append_tokens(self, rows: np.ndarray, tokens: list[list[int]]) -> None:
        """Sampled tokens, at least one for each of ``rows``; all tokens but the last of each have been computed."""
        first = self.num_tokens[rows]
        counts = [len(own) for own in tokens]
        if len(tokens) == sum(counts):
            self.token_ids[rows, first] = [own[0] for own in tokens]
        else:
            for row, start, own in zip(rows, first, tokens, strict=True):
                self.token_ids[row, start : start + len(own)] = own
        known = first + counts
        self.num_tokens[rows] = known
        self.num_computed[rows] = known - 1

    def sampling_rows(self, rows: np.ndarray, offsets: np.ndarray) -> SamplingRows:
        """Parameters for drawing, for each of ``rows``, the token ``offsets`` places behind its next one."""
        temperatures = self._temperatures[rows]
        return SamplingRows(
            temperatures,
            self._top_ks[rows],
            self._top_ps[rows],
            self._min_ps[rows],
            # Greedy requests need none, and are many.
            uniforms(self._seeds[rows], self.num_tokens[rows] + offsets) if temperatures.any() else np.zeros(len(rows)),
        )

    def _write_blocks(self, row: int, first: int, block_ids: tuple[list[int], ...]) -> None:
        for table, ids in zip(self.block_tables, block_ids, strict=True):
            table[row, first : first + len(ids)] = ids
