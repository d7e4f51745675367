"""Drafts from what all requests have generated, and from the request's own prompt."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from ksana.drafters.suffix_index import SuffixIndex
from ksana.drafters.token_trie import TokenTrie
from ksana.types.request import Request

_DEPTH = 16
_MAX_SUFFIX = 4
_MIN_PROMPT_SUFFIX = 2
_PROMPT_WEIGHT = 0.8
_OUTPUT_WEIGHT = 0.2


class TrieDrafter:
    """Proposes what came most often after the last tokens of a request: four of them, or three, two, one.

    Answers go into a tree that all requests share, except that those with different ``cache_salt`` share nothing: what
    one gets faster tells what another was answered. The prompt is searched for itself alone, and counts for more. A
    suffix of one token says little about a prompt, and is looked up in the answers only.

    The tree has two generations. When the young one is full it becomes the old one, and the old one is forgotten: that
    takes no time, and what is still in use has been added to the young one meanwhile.

    Args:
        max_nodes: of both generations. About 110 bytes each; a new token of an answer makes up to 16.
    """

    def __init__(self, max_nodes: int) -> None:
        self._max_nodes = max_nodes // 2
        self._young = TokenTrie()
        self._old = TokenTrie()
        self._states: dict[str, _RequestState] = {}

    def start(self, request: Request) -> None:
        """Index the prompt, and add the tokens generated so far."""
        prompt = request.all_token_ids[: request.num_prompt_tokens]
        self._states[request.request_id] = _RequestState(prompt, SuffixIndex(prompt, _MIN_PROMPT_SUFFIX))
        self.update(request, request.output_token_ids)

    def propose(self, request: Request, limit: int) -> list[int]:
        """The likeliest continuation, at most three times as long as what was recognised."""
        tokens = request.all_token_ids
        state = self._states[request.request_id]
        occurrences = list(state.index.occurrences(tokens, _MAX_SUFFIX))
        for suffix in range(min(_MAX_SUFFIX, len(tokens)), 0, -1):
            ends = [end for end, length in occurrences if length >= suffix]
            nodes = self._find(request.cache_salt, tokens[-suffix:])
            draft = _follow(state.prompt, ends, nodes, min(limit, 3 * suffix, _DEPTH - suffix))
            if draft:
                return draft
        return []

    def update(self, request: Request, new_token_ids: list[int]) -> None:
        """Add the new tokens: each prolongs the paths that begin at the fifteen before it, and begins one."""
        state = self._states[request.request_id]
        for token in new_token_ids:
            young = self._writable()
            if state.trie is not young:
                state.trie, state.paths = young, []
            starts = [young.root(request.cache_salt), *state.paths]
            state.paths = [young.add(node, token) for node in starts][: _DEPTH - 1]

    def finish(self, request: Request) -> None:
        """Drop what belongs to the request; what it has generated stays in the tree."""
        del self._states[request.request_id]

    def _writable(self) -> TokenTrie:
        """The young generation, with room for a token and a root."""
        if len(self._young) + _DEPTH + 1 > self._max_nodes:
            self._young, self._old = TokenTrie(), self._young
        return self._young

    def _find(self, root: str, tokens: list[int]) -> list[_Place]:
        places = ((trie, trie.find(root, tokens)) for trie in (self._young, self._old))
        return [(trie, node) for trie, node in places if node is not None]


_Place = tuple[TokenTrie, int]


@dataclass(slots=True)
class _RequestState:
    """A request's prompt, and the nodes of ``trie`` where its last tokens end, the shortest path first."""

    prompt: list[int]
    index: SuffixIndex
    trie: TokenTrie | None = None
    paths: list[int] = field(default_factory=list)


def _follow(prompt: list[int], ends: list[int], places: list[_Place], limit: int) -> list[int]:
    """Go on from indexes of a prompt and from nodes of tries at the same time, always by the token of highest score."""
    draft: list[int] = []
    while len(draft) < limit:
        token = _best(Counter(prompt[end] for end in ends), places)
        if token is None:
            break
        draft.append(token)
        ends = [end + 1 for end in ends if prompt[end] == token and end + 1 < len(prompt)]
        children = ((trie, trie.child(node, token)) for trie, node in places)
        places = [(trie, child) for trie, child in children if child is not None]
    return draft


def _best(in_prompt: Counter[int], places: list[_Place]) -> int | None:
    """The token of highest score, the smallest of several; None if nothing has ever followed."""
    candidates = set(in_prompt)
    candidates.update(token for trie, node in places if (token := trie.likeliest(node)) is not None)

    def score(token: int) -> tuple[float, int]:
        generated = sum(trie.count(node, token) for trie, node in places)
        return _PROMPT_WEIGHT * in_prompt[token] + _OUTPUT_WEIGHT * generated, -token

    return max(candidates, key=score, default=None)
