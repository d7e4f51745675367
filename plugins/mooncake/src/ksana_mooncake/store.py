"""A block store on Mooncake."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from ksana.connectors.block_store import BlockStore
from ksana_mooncake.client import DAMAGED, OK, PASSING, TOO_LONG, StoreClient
from ksana_mooncake.connection import Connection
from ksana_mooncake.lookups import Lookups
from ksana_mooncake.transfer import DIGEST_BYTES, Pieces, Slots, Staged, address_of, num_bytes

if TYPE_CHECKING:
    from ksana.connectors.block_store import BlockBuffers
    from ksana_mooncake.master import LocalMaster
    from ksana_mooncake.options import GlobalCacheOptions

logger = logging.getLogger("ksana.mooncake")

_BATCH = 64
"""Blocks that are moved by one call at most: between two calls it is seen whether there is time left."""

_WRITERS = 8
"""Threads that can store at a time; another one waits."""


class MooncakeStore(BlockStore):
    """Blocks in the memory that all servers of a Mooncake Store lend each other.

    Whatever goes wrong there is a miss here. While the store is out of reach every answer is a miss, at once.

    Args:
        options: see :class:`GlobalCacheOptions`.
        create_client: makes a client that is not yet connected; called by a thread, again after each failure.
        block_bytes: bytes of the largest block.
        key_prefix: what all keys of this engine begin with.
        master: started and stopped with the store, if there is one to be.
    """

    def __init__(
        self,
        options: GlobalCacheOptions,
        create_client: Callable[[], StoreClient],
        *,
        block_bytes: int,
        key_prefix: str,
        master: LocalMaster | None = None,
    ) -> None:
        self._timeout_s = options.timeout_s
        self._max_retry = options.max_retry
        self._key_prefix = key_prefix
        self._master = master
        self._reads_in_place = options.reads_in_place
        readers = options.fetch_thread_num
        buffer_bytes = max(options.local_buffer_size // readers, block_bytes + DIGEST_BYTES)
        self._read_slots = Slots(readers, _BATCH * DIGEST_BYTES if self._reads_in_place else buffer_bytes)
        self._write_slots = Slots(_WRITERS, _BATCH * DIGEST_BYTES)
        self._lookups = Lookups(self._ask, options.timeout_s)
        self._connection = Connection(create_client, options.name, self._lookups.forget)
        for slots in (self._read_slots, self._write_slots):
            self.register(address_of(slots.region), slots.region.nbytes)
        if master is not None:
            master.start()
        self._connection.start()

    @property
    def is_up(self) -> bool:
        """Whether the store can be reached, as far as is known."""
        return self._connection.is_up

    def register(self, address: int, size: int) -> None:
        """Say that blocks will lie in a region of memory, of ``size`` bytes."""
        self._connection.register(address, size)

    def contains(self, keys: Sequence[str]) -> int | None:
        return self._lookups.count(keys) if self._connection.is_up else 0

    def touch(self, keys: Sequence[str]) -> list[bool]:
        return self._ask(keys) or [False] * len(keys)

    def get(self, keys: Sequence[str], buffers: Sequence[BlockBuffers]) -> list[bool]:
        deadline = time.monotonic() + self._timeout_s
        loaded: list[bool] = []
        for part in self._read_ranges(buffers):
            loaded += self._fetch(keys[part], buffers[part], deadline)
        if self._connection.is_up:
            missing = [key for key, is_loaded in zip(keys, loaded, strict=True) if not is_loaded]
            self._lookups.learn(missing, [False] * len(missing))
        return loaded

    def put(self, keys: Sequence[str], buffers: Sequence[BlockBuffers]) -> list[bool]:
        deadline = time.monotonic() + self._timeout_s
        stored: list[bool] = []
        for start in range(0, len(keys), _BATCH):
            part = slice(start, start + _BATCH)
            stored += self._store(keys[part], buffers[part], deadline)
        kept = [key for key, is_stored in zip(keys, stored, strict=True) if is_stored]
        self._lookups.learn(kept, [True] * len(kept))
        return stored

    def clear(self) -> None:
        self._lookups.forget()
        self._lookups.after(self._remove)

    def close(self) -> None:
        self._lookups.close()
        self._connection.close()
        if self._master is not None:
            self._master.stop()

    def _ask(self, keys: Sequence[str]) -> list[bool] | None:
        client = self._connection.reach()
        if client is None:
            return None
        codes = client.exists(keys)
        self._connection.report(codes)
        return [code == 1 for code in codes]

    def _remove(self) -> None:
        if (client := self._connection.reach()) is not None:
            client.remove(f"^{self._key_prefix}")

    def _store(self, keys: Sequence[str], blocks: Sequence[BlockBuffers], deadline: float) -> list[bool]:
        client = self._connection.reach() if time.monotonic() < deadline else None
        if client is None:
            return [False] * len(keys)
        with self._write_slots.take() as slot:
            pieces = Pieces(keys, blocks, slot)
            pieces.seal()
            codes = client.put(keys, pieces.addresses(), pieces.sizes())
        self._connection.report_transfer(codes)
        return [code == OK for code in codes]

    def _read_ranges(self, blocks: Sequence[BlockBuffers]) -> Iterator[slice]:
        """Cut what is to be read into pieces that fit a slot."""
        room = self._read_slots.region.shape[1]
        start, used = 0, 0
        for index, block in enumerate(blocks):
            size = DIGEST_BYTES + (0 if self._reads_in_place else num_bytes(block))
            if index > start and (used + size > room or index - start == _BATCH):
                yield slice(start, index)
                start, used = index, 0
            used += size
        yield slice(start, len(blocks))

    def _fetch(self, keys: Sequence[str], blocks: Sequence[BlockBuffers], deadline: float) -> list[bool]:
        """Read blocks; what may go better the next time is tried again."""
        loaded = [False] * len(keys)
        wanted = list(range(len(keys)))
        for _ in range(1 + self._max_retry):
            client = self._connection.reach() if wanted and time.monotonic() < deadline else None
            if client is None:
                break
            codes = self._read(client, [keys[index] for index in wanted], [blocks[index] for index in wanted])
            for index, code in zip(wanted, codes, strict=True):
                loaded[index] = code == OK
            wanted = [index for index, code in zip(wanted, codes, strict=True) if code in PASSING]
        return loaded

    def _read(self, client: StoreClient, keys: Sequence[str], blocks: Sequence[BlockBuffers]) -> list[int]:
        """Read blocks once: OK for each that is there now, else what is wrong."""
        with self._read_slots.take() as slot:
            values = (Pieces if self._reads_in_place else Staged)(keys, blocks, slot)
            codes = client.get(keys, values.addresses(), values.sizes())
            self._connection.report_transfer(codes)
            codes = [_judge(code, values, index) for index, code in enumerate(codes)]
        for key in (key for key, code in zip(keys, codes, strict=True) if code == DAMAGED):
            logger.warning("block %s of the global cache is damaged; removed it", key)
            client.remove(f"^{key}$")
        return codes


def _judge(code: int, values: Pieces | Staged, index: int) -> int:
    """What is wrong with a value that was read: OK for nothing."""
    if code == TOO_LONG:
        return DAMAGED
    if code < OK:
        return code
    return OK if values.open(index) else DAMAGED
