"""What has been generated, as a tree of counted tokens of bounded size."""

from __future__ import annotations

_TOKEN_BITS = 32
_NO_TOKEN = -1


class TokenTrie:
    """A tree whose paths are sequences of tokens, each node with the number of times that it was reached.

    A node is an integer. All are in a handful of flat containers: a tree of objects takes thrice the memory, and the
    garbage collector walks it.
    """

    def __init__(self) -> None:
        self._roots: dict[str, int] = {}
        self._children: dict[int, int] = {}
        self._counts: list[int] = []
        self._likeliest: list[int] = []

    def __len__(self) -> int:
        return len(self._counts)

    def root(self, name: str) -> int:
        """The root of that name, made if there is none. Nothing is shared by different roots."""
        node = self._roots.get(name)
        if node is None:
            node = self._roots[name] = self._new_node()
        return node

    def add(self, node: int, token: int) -> int:
        """Go from ``node`` to its child by ``token``, made if there is none, and count it."""
        counts = self._counts
        key = node << _TOKEN_BITS | token
        child = self._children.get(key)
        if child is None:
            child = self._children[key] = self._new_node()
        counts[child] += 1
        likeliest = self._likeliest[node]
        if likeliest == _NO_TOKEN or counts[child] > self.count(node, likeliest):
            self._likeliest[node] = token
        return child

    def child(self, node: int, token: int) -> int | None:
        """The child of ``node`` by ``token``."""
        return self._children.get(node << _TOKEN_BITS | token)

    def find(self, name: str, tokens: list[int]) -> int | None:
        """The end of the path of ``tokens`` from the root of that name."""
        node = self._roots.get(name)
        for token in tokens:
            if node is None:
                break
            node = self.child(node, token)
        return node

    def count(self, node: int, token: int) -> int:
        """How often ``token`` came after ``node``."""
        child = self.child(node, token)
        return 0 if child is None else self._counts[child]

    def likeliest(self, node: int) -> int | None:
        """The token that came most often after ``node``; None if there was none."""
        token = self._likeliest[node]
        return None if token == _NO_TOKEN else token

    def _new_node(self) -> int:
        self._counts.append(0)
        self._likeliest.append(_NO_TOKEN)
        return len(self._counts) - 1
