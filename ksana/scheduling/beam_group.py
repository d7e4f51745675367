"""The beams of a search as requests: who has whose blocks, and what the worker has to hear."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence

from ksana.kv.manager import KVCacheManager
from ksana.scheduling.beam_search import BeamSearch
from ksana.types.kv import BlockCounts
from ksana.types.request import Request
from ksana.types.step import BeamCandidates, BlockTableUpdate, NewRequestData, SchedulerOutput


class BeamGroup:
    """Beams of one search. All have as many tokens, and as many of them computed; they go on together or not at all.

    The leader is the request that waits, runs and is preempted for all of them: the queues know no other. It is always
    one of the beams, since what it computes first is the prompt. The other beams are requests without a client.

    Args:
        leader: a request that nothing has been computed for.

    Attributes:
        search: which texts go on.
        beams: one for each of ``search.beams``, in the same order; the leader alone while it computes what all share.
    """

    def __init__(self, leader: Request) -> None:
        max_tokens = leader.max_total_tokens - leader.num_prompt_tokens
        self.search = BeamSearch(leader.sampling, max_tokens, leader.stop_token_ids)
        self.beams = [leader]
        self._leader = leader
        self._tails: list[list[int]] = []  # after a preemption, what each beam has behind the leader's tokens
        self._num_made = 0
        self._new_ids: set[str] = set()  # of beams for which the worker has no row yet, or one of other tokens
        self._chosen: dict[str, list[int]] = {}  # tokens that the worker does not know yet

    def has_row(self, request_id: str) -> bool:
        """True if that is one of the beams."""
        return any(beam.request_id == request_id for beam in self.beams)

    def needed_blocks(self, kv: KVCacheManager, max_chunk: int) -> BlockCounts:
        """Most blocks, of all beams together, until each has a token more than now."""
        leader = self._leader
        num_tokens = leader.num_tokens + (len(self._tails[0]) if self._tails else 0) + 1
        return kv.peak_blocks_of_beams(leader.sampling.num_beams, leader.num_tokens, num_tokens, max_chunk)

    def num_to_schedule(self, budget: int, prompt_budget: int, max_chunk: int) -> int:
        """How many tokens each beam may go on by in the next step.

        Never beyond the known ones: how it goes on is known when those of all beams are computed.

        Args:
            budget: tokens of the step that are left.
            prompt_budget: of those, what may be computed of long texts.
            max_chunk: most tokens of a beam.
        """
        leader = self._leader
        left = leader.num_tokens - leader.num_computed_tokens - leader.num_in_flight
        num_beams = len(self.beams)
        return min(left, max_chunk, budget // num_beams, max(1, prompt_budget // num_beams))

    def schedule(
        self, count: int, updates: Sequence[BlockTableUpdate], kv: KVCacheManager, step: SchedulerOutput
    ) -> None:
        """Let each beam compute ``count`` tokens in the step, and tell the worker what is new about them.

        Args:
            updates: what has changed in the block table of each beam.
        """
        for beam, update in zip(self.beams, updates, strict=True):
            request_id = beam.request_id
            if request_id in self._new_ids:
                step.new_beams.append(NewRequestData.of(beam, kv.block_ids(request_id)))
            elif not update.is_empty:
                step.block_table_updates[request_id] = update
            step.num_scheduled_tokens[request_id] = count
            beam.num_in_flight += count
        step.chosen_token_ids.update(self._chosen)
        self._chosen.clear()
        self._new_ids.clear()

    def update(self, num_computed: int, candidates: Mapping[str, BeamCandidates], kv: KVCacheManager) -> list[str]:
        """Each beam has computed ``num_computed`` tokens. If those were its last, go on.

        Args:
            candidates: by beam; for none of them if there are known tokens left to compute.

        Returns:
            Ids of beams that are no more. If the search is done, all of them keep their blocks.
        """
        for beam in self.beams:
            beam.num_computed_tokens += num_computed
            beam.num_in_flight -= num_computed
            kv.commit(beam)
        if self._leader.request_id not in candidates:
            return []
        if self._tails:
            tails, self._tails = self._tails, []
            return self._branch([0] * len(tails), tails, kv)
        parents = self.search.advance([candidates[beam.request_id] for beam in self.beams])
        if self.search.is_done:
            return []
        return self._branch(parents, [[beam.token_id] for beam in self.search.beams], kv)

    def suspend(self, kv: KVCacheManager) -> list[str]:
        """Give back all blocks; returns the ids of the beams. What they share will be computed once, by the leader."""
        ids = [beam.request_id for beam in self.beams]
        for beam in self.beams:
            kv.free(beam)
        leader = self._leader
        if leader.num_output_tokens and not self._tails and not self.search.is_done:
            texts = [beam.all_token_ids for beam in self.beams]
            shared = _num_shared(texts, leader.num_prompt_tokens)
            self._tails = [text[shared:] for text in texts]
            leader.all_token_ids = texts[0][:shared]
            del leader.block_hashes[shared // kv.block_size :]
        self.beams = [leader]
        self._chosen.clear()
        self._new_ids.clear()
        return ids

    def hand_over(self, successor: Request) -> None:
        """The leader leaves, and another request that waits for the search leads it. The group is suspended."""
        leader, self._leader = self._leader, successor
        successor.all_token_ids = list(leader.all_token_ids)
        successor.block_hashes = list(leader.block_hashes)
        successor.beam_group, leader.beam_group = self, None
        self.beams = [successor]

    def _branch(self, parents: Sequence[int], tails: Sequence[list[int]], kv: KVCacheManager) -> list[str]:
        """New beams, each with the tokens and blocks of an old one, and with some more tokens."""
        old, length = self.beams, self._leader.num_computed_tokens
        self.beams = self._assign(parents)
        for beam, parent, tail in zip(self.beams, parents, tails, strict=True):
            source = old[parent]
            if beam is source:
                beam.all_token_ids += tail
                self._chosen[beam.request_id] = tail
                continue
            kv.free(beam)  # the leader may still have those of a text that has come to nothing
            beam.all_token_ids = source.all_token_ids[:length] + tail
            beam.block_hashes = source.block_hashes[: length // kv.block_size]
            beam.num_computed_tokens = length
            kv.fork(source, beam, length)
            self._new_ids.add(beam.request_id)
        dropped = [beam for beam in old if beam not in self.beams]
        for beam in dropped:
            kv.free(beam)
        return [beam.request_id for beam in dropped]

    def _assign(self, parents: Sequence[int]) -> list[Request]:
        """Requests for the new beams: the first to continue an old one takes over its request, others get new ones."""
        beams: list[Request | None] = []
        for position, parent in enumerate(parents):
            beams.append(self.beams[parent] if parent not in parents[:position] else None)
        if self._leader not in beams:
            beams[beams.index(None) if None in beams else 0] = self._leader
        return [beam or self._make_beam() for beam in beams]

    def _make_beam(self) -> Request:
        """A request like the leader; tokens and blocks come later."""
        beam = copy.copy(self._leader)
        self._num_made += 1
        beam.request_id = f"{self._leader.request_id}/{self._num_made}"
        beam.num_in_flight = 0
        beam.captures = ()
        beam.followers = []
        beam.beam_group = None
        return beam


def _num_shared(texts: Sequence[list[int]], start: int) -> int:
    """Tokens, at least ``start``, that all texts begin with; at least one of each is left over."""
    end = len(texts[0]) - 1
    while start < end and len({text[start] for text in texts}) == 1:
        start += 1
    return start
