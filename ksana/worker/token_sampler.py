"""From a step's logits to the tokens of its requests: processors, drafts, draws, log probabilities."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from ksana.kernels.base import KernelBackend
from ksana.types.output import TokenLogprobs
from ksana.types.step import ModelRunnerOutput
from ksana.worker.beam_candidates import beam_candidates
from ksana.worker.input_batch import InputBatch
from ksana.worker.logits_processor import BANNED, LogitsProcessors
from ksana.worker.sampler import sample, take_rows, token_logprobs

_NO_TOKEN = -1


@dataclass(slots=True)
class SampledRows:
    """Which logits belong to whom.

    Request i has ``num_drafts[i] + 1`` rows in succession: the last known token's, and one for each drafted token.

    Attributes:
        rows: int64 [m], the requests' rows in the input batch.
        num_drafts: int64 [m].
        starts: int64 [m], each request's first row of the logits.
    """

    rows: np.ndarray
    num_drafts: np.ndarray
    starts: np.ndarray

    @classmethod
    def of(cls, rows: np.ndarray, num_drafts: np.ndarray) -> SampledRows:
        """Lay out the rows of requests one after the other."""
        lengths = num_drafts + 1
        return cls(rows, num_drafts, np.cumsum(lengths) - lengths)

    def take(self, requests: np.ndarray) -> SampledRows:
        """Some of the requests; their logits stay where they are."""
        return SampledRows(self.rows[requests], self.num_drafts[requests], self.starts[requests])

    def members(self) -> np.ndarray:
        """int64, for each of their rows of the logits the index of its request."""
        return np.repeat(np.arange(len(self.rows)), self.num_drafts + 1)


class TokenSampler:
    """Draws the next tokens of requests, and appends them to their rows.

    A drafted token is accepted if it is the very token that is drawn in its place. Every place has a random number of
    its own (:mod:`ksana.worker.random`), so the tokens are those that would have been drawn without a draft.

    Args:
        backend: computed the logits.
        batch: the requests' rows.
        processors: change logits before a draw. Log probabilities are of the logits as the model gave them.
    """

    def __init__(self, backend: KernelBackend, batch: InputBatch, processors: LogitsProcessors) -> None:
        self._backend = backend
        self._batch = batch
        self._processors = processors

    @property
    def needs_logits(self) -> bool:
        """Whether any request asks more of its logits than :meth:`take` gets."""
        return bool(self._processors) or not self._batch.all_greedy

    def take(
        self,
        likeliest: np.ndarray,
        finite: np.ndarray,
        rows: np.ndarray,
        num_drafts: np.ndarray,
        output: ModelRunnerOutput,
    ) -> None:
        """What :meth:`sample` does, for requests that are all greedy and ask for nothing else.

        Args:
            likeliest, finite: what :meth:`KernelBackend.argmax` would find in the logits.
            rows, num_drafts, output: as for :meth:`sample`.
        """
        sampled, kept = self._sound(finite, rows, num_drafts, output)
        if len(sampled.rows):
            self._append(sampled, self._accept(likeliest if kept is None else likeliest[kept], sampled), output)

    def sample(self, logits: torch.Tensor, rows: np.ndarray, num_drafts: np.ndarray, output: ModelRunnerOutput) -> None:
        """Draw, append, and report. Of beams nothing is drawn: what may follow them is reported.

        Args:
            logits: float32 [n, vocab_size], as :class:`SampledRows` lays them out.
            rows: int64 [m], the requests' rows in the input batch.
            num_drafts: int64 [m], drafted tokens of each; they stand behind its last token in the input batch.
            output: gets tokens, log probabilities, and requests that have none: their logits are not finite, or each
                of their tokens is banned.
        """
        likeliest, finite = self._backend.argmax(logits)
        sampled, kept = self._sound(finite, rows, num_drafts, output)
        if kept is not None:
            logits, likeliest = logits[torch.from_numpy(kept)], likeliest[kept]
        beams = self._batch.num_candidates[sampled.rows] > 0
        if beams.any():
            self._rank(logits, sampled.take(np.flatnonzero(beams)), output)
            sampled = sampled.take(np.flatnonzero(~beams))
            if not len(sampled.rows):
                return
        tokens = self._draw_all(logits, likeliest, sampled)
        if self._processors and not all(map(len, tokens)):
            drawn = np.fromiter(map(len, tokens), dtype=np.int64) > 0
            output.banned_request_ids = [self._batch.request_ids[row] for row in sampled.rows[~drawn]]
            sampled, tokens = sampled.take(drawn), [own for own in tokens if len(own)]
        if len(sampled.rows):
            self._report(logits, sampled, tokens, output)

    def _sound(
        self, finite: np.ndarray, rows: np.ndarray, num_drafts: np.ndarray, output: ModelRunnerOutput
    ) -> tuple[SampledRows, np.ndarray | None]:
        """The requests whose logits are finite, and which logits are theirs, bool [n]; None if all are."""
        sampled = SampledRows.of(rows, num_drafts)
        if finite.all():
            return sampled, None
        healthy = np.logical_and.reduceat(finite, sampled.starts)  # NaN or infinity anywhere would poison a softmax
        output.broken_request_ids = [self._batch.request_ids[row] for row in rows[~healthy]]
        return SampledRows.of(rows[healthy], num_drafts[healthy]), healthy[sampled.members()]

    def _rank(self, logits: torch.Tensor, beams: SampledRows, output: ModelRunnerOutput) -> None:
        batch, rows = self._batch, beams.rows
        output.candidates = beam_candidates(
            self._backend,
            take_rows(logits, beams.starts),
            [batch.request_ids[row] for row in rows],
            batch.num_candidates[rows],
            batch.num_logprobs[rows],
            self._processors,
        )

    def _draw_all(self, logits: torch.Tensor, likeliest: np.ndarray, sampled: SampledRows) -> list[list[int]]:
        """The tokens of each request: accepted drafts and one more, or none if all are banned."""
        ids = self._batch.request_ids
        if not self._processors:
            return self._draw_plain(logits, likeliest, sampled)
        processed = np.fromiter((ids[row] in self._processors for row in sampled.rows), bool, len(sampled.rows))
        tokens: list[list[int]] = [[]] * len(processed)
        plain = np.flatnonzero(~processed)
        for member, own in zip(plain.tolist(), self._draw_plain(logits, likeliest, sampled.take(plain)), strict=True):
            tokens[member] = own
        for member, own in self._draw_processed(logits, sampled, np.flatnonzero(processed)).items():
            tokens[member] = own
        return tokens

    def _draw_plain(self, logits: torch.Tensor, likeliest: np.ndarray, sampled: SampledRows) -> list[list[int]]:
        """All places at once: nothing that is drawn in one changes the logits of another."""
        members, firsts = sampled.members(), SampledRows.of(sampled.rows, sampled.num_drafts).starts
        offsets = np.arange(len(members)) - firsts[members]
        params = self._batch.sampling_rows(sampled.rows[members], offsets)
        drawn = sample(self._backend, logits, likeliest, params, sampled.starts[members] + offsets)
        return self._accept(drawn, sampled)

    def _accept(self, drawn: np.ndarray, sampled: SampledRows) -> list[list[int]]:
        """Each request's accepted drafts and one token more, of what was drawn for all its rows, in succession."""
        if len(drawn) == len(sampled.rows):
            return [[token] for token in drawn.tolist()]
        tokens, start = [], 0
        for row, count in zip(sampled.rows.tolist(), sampled.num_drafts.tolist(), strict=True):
            accepted = _num_equal(drawn[start : start + count], self._batch.drafts(row, count)) if count else 0
            tokens.append(drawn[start : start + accepted + 1].tolist())
            start += count + 1
        return tokens

    def _draw_processed(self, logits: torch.Tensor, sampled: SampledRows, members: np.ndarray) -> dict[int, list[int]]:
        """Place after place, since what is drawn in one may change the logits of the next.

        A request that comes to a place with nothing left to draw has no tokens at all.
        """
        ids = self._batch.request_ids
        drawn: dict[int, list[int]] = {int(member): [] for member in members}
        offset = 0
        while len(members):
            rows = sampled.rows[members]
            request_ids = [ids[row] for row in rows]
            places = torch.from_numpy(sampled.starts[members] + offset).to(logits.device)
            changed = logits.index_select(0, places)
            self._processors.apply(changed, request_ids)
            tokens = self._draw_changed(changed, rows, offset).tolist()
            going_on = []
            for member, request_id, token in zip(members.tolist(), request_ids, tokens, strict=True):
                if token == _NO_TOKEN:
                    drawn[member] = []
                    continue
                drawn[member].append(token)
                self._processors.accept(request_id, token)
                count = sampled.num_drafts[member]
                if offset < count and token == self._batch.drafts(sampled.rows[member], count)[offset]:
                    going_on.append(member)
            members = np.array(going_on, dtype=np.int64)
            offset += 1
        return drawn

    def _draw_changed(self, logits: torch.Tensor, rows: np.ndarray, offset: int) -> np.ndarray:
        """int64, for each row a token or ``_NO_TOKEN``, from what the processors have left."""
        likeliest, finite = self._backend.argmax(logits)
        largest = logits[torch.arange(len(logits)), torch.from_numpy(likeliest)].cpu().numpy()
        left = np.flatnonzero(finite & (largest > BANNED))
        tokens = np.full(len(rows), _NO_TOKEN)
        params = self._batch.sampling_rows(rows[left], np.full(len(left), offset))
        tokens[left] = sample(self._backend, logits, likeliest, params, left)
        return tokens

    def _report(
        self, logits: torch.Tensor, sampled: SampledRows, tokens: list[list[int]], output: ModelRunnerOutput
    ) -> None:
        ids = self._batch.request_ids
        wanted = np.flatnonzero(self._batch.num_logprobs[sampled.rows] >= 0)
        if len(wanted):
            counts = np.fromiter(map(len, tokens), dtype=np.int64, count=len(tokens))
            found = self._logprobs(logits, sampled, tokens, counts, wanted)
            ends = np.cumsum(counts[wanted]).tolist()
            for member, start, end in zip(wanted, [0, *ends], ends, strict=False):
                output.logprobs[ids[sampled.rows[member]]] = found[start:end]
        self._append(sampled, tokens, output)

    def _append(self, sampled: SampledRows, tokens: list[list[int]], output: ModelRunnerOutput) -> None:
        ids = self._batch.request_ids
        self._batch.append_tokens(sampled.rows, tokens)
        output.sampled_token_ids = {ids[row]: own for row, own in zip(sampled.rows.tolist(), tokens, strict=True)}

    def _logprobs(
        self,
        logits: torch.Tensor,
        sampled: SampledRows,
        tokens: list[list[int]],
        counts: np.ndarray,
        wanted: np.ndarray,
    ) -> list[TokenLogprobs]:
        places = np.concatenate([np.arange(sampled.starts[i], sampled.starts[i] + counts[i]) for i in wanted])
        asked = np.repeat(self._batch.num_logprobs[sampled.rows[wanted]], counts[wanted])
        return token_logprobs(
            self._backend, take_rows(logits, places), np.array([token for i in wanted for token in tokens[i]]), asked
        )


def _num_equal(drawn: np.ndarray, drafts: np.ndarray) -> int:
    """How many tokens agree before the first that does not."""
    different = np.flatnonzero(drawn != drafts)
    return int(different[0]) if len(different) else len(drafts)
