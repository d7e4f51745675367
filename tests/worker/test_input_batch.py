"""The worker's rows against dictionaries."""

from __future__ import annotations

from dataclasses import dataclass

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ksana.errors import UsageError
from ksana.testing.paged_memory import apply_table_update, make_kv_config
from ksana.types.request import InputEmbedding
from ksana.types.sampling import SamplingParams
from ksana.types.step import BlockTableUpdate, NewRequestData
from ksana.worker.input_batch import InputBatch
from ksana.worker.random import uniforms

MAX_SEQS, MAX_LEN, BLOCK_SIZE = 5, 24, 4

SAMPLING = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.5, 2.0]),
    top_k=st.sampled_from([-1, 0, 1, 8, 2**80]),
    top_p=st.sampled_from([0.25, 1.0]),
    min_p=st.sampled_from([0.0, 0.125]),
    logprobs=st.sampled_from([None, 0, 3]),
)


@dataclass
class Row:
    """What a row must hold."""

    tokens: list[int]
    num_computed: int
    tables: tuple[list[int], ...]
    sampling: SamplingParams
    seed: int
    embeddings: tuple[InputEmbedding, ...]


class InputBatchMachine(RuleBasedStateMachine):
    @initialize(num_groups=st.integers(1, 3))
    def create(self, num_groups: int) -> None:
        self.num_groups = num_groups
        self.batch = InputBatch(MAX_SEQS, MAX_LEN, make_kv_config(50, BLOCK_SIZE, [None] * num_groups))
        self.rows: dict[str, Row] = {}
        self.added = 0

    @precondition(lambda self: len(self.rows) < MAX_SEQS)
    @rule(data=st.data(), sampling=SAMPLING, seed=st.integers(0, 2**64 - 1), has_embeddings=st.booleans())
    def add(self, data: st.DataObject, sampling: SamplingParams, seed: int, has_embeddings: bool) -> None:
        tokens = data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=MAX_LEN - 4))
        computed = data.draw(st.integers(0, len(tokens) - 1))
        tables = self._blocks(data, data.draw(st.integers(1, -(-len(tokens) // BLOCK_SIZE))))
        embeddings = (InputEmbedding(0, np.ones((1, 2))),) if has_embeddings else ()
        name = f"r{self.added}"
        self.added += 1
        self.batch.add(
            NewRequestData(
                name, list(tokens), computed, tuple(map(list, tables)), sampling, seed, len(tokens), embeddings
            )
        )
        self.rows[name] = Row(list(tokens), computed, tables, sampling, seed, embeddings)

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.rows)))
        self.batch.remove(name)
        del self.rows[name]
        self.batch.remove(name)  # finished requests may be named twice

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def update_block_table(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.rows)))
        row = self.rows[name]
        first = data.draw(st.integers(0, len(row.tables[0])))
        count = data.draw(st.integers(len(row.tables[0]) - first, MAX_LEN // BLOCK_SIZE - first))
        update = BlockTableUpdate(first, self._blocks(data, count))
        apply_table_update(row.tables, update)
        self.batch.update_block_table(name, update)

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def append_tokens(self, data: st.DataObject) -> None:
        open_rows = sorted(name for name, row in self.rows.items() if len(row.tokens) < MAX_LEN)
        names = data.draw(st.lists(st.sampled_from(open_rows), unique=True)) if open_rows else []
        tokens = [
            data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=MAX_LEN - len(self.rows[name].tokens)))
            for name in names
        ]
        self.batch.append_tokens(self.batch.rows(names), [np.array(own, dtype=np.int64) for own in tokens])
        for name, own in zip(names, tokens, strict=True):
            self.rows[name].tokens += own
            self.rows[name].num_computed = len(self.rows[name].tokens) - 1

    @invariant()
    def rows_are_as_told(self) -> None:
        if not hasattr(self, "batch"):
            return
        assert len(self.batch) == len(self.rows)
        assert sorted(self.batch.request_ids) == sorted(self.rows)
        names = sorted(self.rows)
        index = self.batch.rows(names)
        assert sorted(index.tolist()) == list(range(len(names)))
        for name, place in zip(names, index, strict=True):
            row = self.rows[name]
            assert self.batch.request_ids[place] == name
            assert self.batch.num_tokens[place] == len(row.tokens)
            assert self.batch.num_computed[place] == row.num_computed
            assert self.batch.num_logprobs[place] == (-1 if row.sampling.logprobs is None else row.sampling.logprobs)
            assert self.batch.token_ids[place, : len(row.tokens)].tolist() == row.tokens
            for table, expected in zip(self.batch.block_tables, row.tables, strict=True):
                assert table[place, : len(expected)].tolist() == expected
        assert self.batch.embeddings == {name: row.embeddings for name, row in self.rows.items() if row.embeddings}

    @invariant()
    def sampling_rows_are_as_told(self) -> None:
        names = sorted(getattr(self, "rows", {}))
        if not names:
            return
        offsets = np.arange(len(names))
        params = self.batch.sampling_rows(self.batch.rows(names), offsets)
        for index, name in enumerate(names):
            row = self.rows[name]
            sampling = row.sampling
            assert params.temperatures[index] == (0.0 if sampling.is_greedy else sampling.temperature)
            assert params.top_ks[index] == min(max(0, sampling.top_k), 2**63 - 1)
            assert params.top_ps[index] == sampling.top_p
            assert params.min_ps[index] == sampling.min_p
            position = np.array([len(row.tokens) + offsets[index]])
            if not sampling.is_greedy:
                assert params.uniforms[index] == uniforms(np.array([row.seed], dtype=np.uint64), position)[0]

    def _blocks(self, data: st.DataObject, count: int) -> tuple[list[int], ...]:
        ids = st.lists(st.integers(1, 49), min_size=count, max_size=count)
        return tuple(data.draw(ids) for _ in range(self.num_groups))


TestInputBatch = InputBatchMachine.TestCase


def test_more_rows_than_there_is_memory_for_are_refused() -> None:
    with pytest.raises(UsageError, match="--max-num-seqs 65536: there is no memory for tables"):
        InputBatch(65_536, 2**40, make_kv_config(4, 4))


def test_rows_of_unknown_requests_are_an_error() -> None:
    """A scheduler and a worker that disagree must not go on with somebody else's row."""
    batch = InputBatch(2, 8, make_kv_config(4, 4))
    with pytest.raises(KeyError):
        batch.rows(["nobody"])
