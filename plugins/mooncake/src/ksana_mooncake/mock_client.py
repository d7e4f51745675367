"""A store within one process, which answers as Mooncake does: for tests, and for trying things out."""

from __future__ import annotations

import ctypes
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ksana_mooncake.client import NO_SPACE, NOT_FOUND, OK, RPC_FAILED, TOO_LONG, Addresses, Sizes
from ksana_mooncake.options import GlobalCacheOptions

_LEASE_S = 5.0


@dataclass(slots=True)
class _Value:
    content: bytes
    owner: int
    leased_until: float = 0.0


_masters: dict[str, MockMaster] = {}
_masters_lock = threading.Lock()


class MockMaster:
    """All values of one address, in memory that its clients lend."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.values: OrderedDict[str, _Value] = OrderedDict()  # the longest unused first
        self.segments: dict[int, int] = {}

    @classmethod
    def at(cls, address: str) -> MockMaster:
        """The store that all clients of that address in this process share."""
        with _masters_lock:
            return _masters.setdefault(address, cls())

    def restart(self) -> None:
        """Forget all values, as a master does."""
        with self.lock:
            self.values.clear()

    def make_room(self, size: int) -> bool:
        """Evict what nobody reads until ``size`` bytes are free; False, with nothing evicted, if that is impossible."""
        room = sum(self.segments.values()) - sum(len(value.content) for value in self.values.values())
        now = time.monotonic()
        victims: list[str] = []
        for key, value in self.values.items():
            if room >= size:
                break
            if value.leased_until < now:
                victims.append(key)
                room += len(value.content)
        if room < size:
            return False
        for key in victims:
            del self.values[key]
        return True

    def find(self, key: str) -> _Value | None:
        """The value, which then stays for some seconds."""
        value = self.values.get(key)
        if value is not None:
            self.values.move_to_end(key)
            value.leased_until = time.monotonic() + _LEASE_S
        return value


class MockClient:
    """A client of :class:`MockMaster`.

    Attributes:
        is_down: set by tests: the master does not answer.
        delay_s: set by tests: seconds that every answer takes.
    """

    def __init__(self, options: GlobalCacheOptions) -> None:
        self.master = MockMaster.at(str(options.master))
        self.is_down = False
        self.delay_s = 0.0
        self._segment_size = options.global_segment_size

    def is_reachable(self) -> bool:
        return not self.is_down

    def connect(self) -> int:
        if self.is_down:
            return RPC_FAILED
        with self.master.lock:
            self.master.segments[id(self)] = self._segment_size
        return OK

    def register(self, address: int, size: int) -> int:
        return OK

    def exists(self, keys: Sequence[str]) -> list[int]:
        return self._each(keys, lambda index: int(self.master.find(keys[index]) is not None))

    def put(self, keys: Sequence[str], addresses: Addresses, sizes: Sizes) -> list[int]:
        return self._each(keys, lambda index: self._put(keys[index], addresses[index], sizes[index]))

    def get(self, keys: Sequence[str], addresses: Addresses, sizes: Sizes) -> list[int]:
        return self._each(keys, lambda index: self._get(keys[index], addresses[index], sizes[index]))

    def remove(self, pattern: str) -> int:
        with self.master.lock:
            found = [key for key in self.master.values if re.search(pattern, key)]
            for key in found:
                del self.master.values[key]
            return len(found)

    def close(self) -> None:
        with self.master.lock:
            self.master.segments.pop(id(self), None)
            for key in [key for key, value in self.master.values.items() if value.owner == id(self)]:
                del self.master.values[key]

    def _each(self, keys: Sequence[str], work: Callable[[int], int]) -> list[int]:
        if self.delay_s:
            time.sleep(self.delay_s)
        if self.is_down:
            return [RPC_FAILED] * len(keys)
        with self.master.lock:
            return [work(index) for index in range(len(keys))]

    def _put(self, key: str, addresses: Sequence[int], sizes: Sequence[int]) -> int:
        if key in self.master.values:
            return OK
        if not self.master.make_room(sum(sizes)):
            return NO_SPACE
        content = b"".join(map(ctypes.string_at, addresses, sizes))
        self.master.values[key] = _Value(content, id(self))
        return OK

    def _get(self, key: str, addresses: Sequence[int], sizes: Sequence[int]) -> int:
        value = self.master.find(key)
        if value is None:
            return NOT_FOUND
        if len(value.content) > sum(sizes):
            return TOO_LONG
        start = 0
        for address, size in zip(addresses, sizes, strict=True):
            piece = value.content[start : start + size]
            ctypes.memmove(address, piece, len(piece))
            start += size
        return len(value.content)
