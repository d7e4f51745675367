"""The cache has its pages before it is written, and no more of them than somebody asked for."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import numpy as np
import pytest
import torch

from ksana.kernels.batch import AttentionBatch
from ksana.kernels.cpu.huge_pages import PAGE_BYTES, HugePageArena
from ksana.kernels.cpu.native_backend import NativeCPUBackend
from ksana.kernels.cpu.pages_ahead import PagesAhead
from ksana.types.kv import FullAttentionSpec, KVCacheConfig, KVCacheGroup

BLOCK_BYTES = PAGE_BYTES // 4
SMALL_PAGE = 4096


def cache_tensors(*numbers_of_blocks: int) -> list[torch.Tensor]:
    """Each on large pages of its own."""
    return [HugePageArena().allocate(count * BLOCK_BYTES).view(count, -1) for count in numbers_of_blocks]


def resident_share(tensor: torch.Tensor) -> float:
    """Of the pages of a tensor, those that the process has."""
    pages = (ctypes.c_ubyte * (tensor.nbytes // SMALL_PAGE))()
    address = ctypes.c_void_p(tensor.data_ptr())
    assert ctypes.CDLL(None).mincore(address, ctypes.c_size_t(tensor.nbytes), pages) == 0
    return float(np.frombuffer(pages, dtype=np.uint8).mean())


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux hands out pages on request")
def test_pages_are_there_before_anything_is_written_and_only_those() -> None:
    tensors = cache_tensors(64, 64)
    pages = PagesAhead(tensors, ahead_bytes=2 * 16 * BLOCK_BYTES)
    pages.join(30)
    assert [resident_share(tensor[:16]) for tensor in tensors] == [1.0, 1.0]
    assert [resident_share(tensor[16:]) for tensor in tensors] == [0.0, 0.0]
    pages.reach(20)
    pages.join(30)
    assert [resident_share(tensor[:36]) for tensor in tensors] == [1.0, 1.0]
    assert [resident_share(tensor[36:]) for tensor in tensors] == [0.0, 0.0]


def test_what_is_written_already_stays() -> None:
    (tensor,) = cache_tensors(32)
    tensor[:] = torch.arange(32, dtype=torch.uint8)[:, None]
    pages = PagesAhead([tensor])
    pages.join(30)
    assert torch.equal(tensor[:, 7], torch.arange(32, dtype=torch.uint8))


class Recorder:
    """Takes pages by writing their addresses down."""

    def __init__(self, fails_at: int = -1) -> None:
        self.addresses: list[int] = []
        self._fails_at = fails_at

    def __call__(self, address: int, num_bytes: int) -> None:
        if len(self.addresses) == self._fails_at:
            raise OSError("the system knows no such request")
        self.addresses.append(address)
        assert num_bytes == PAGE_BYTES
        assert address % PAGE_BYTES == 0


def test_groups_of_different_sizes_each_get_all_of_their_pages() -> None:
    tensors = cache_tensors(64, 8)
    taken = Recorder()
    pages = PagesAhead(tensors, take=taken)
    for block in range(64):
        pages.reach(block)
    pages.join(30)
    wanted = {tensor[block].data_ptr() // PAGE_BYTES * PAGE_BYTES for tensor in tensors for block in range(len(tensor))}
    assert set(taken.addresses) == wanted


def test_pages_of_lower_blocks_come_first() -> None:
    tensors = cache_tensors(64, 64)
    taken = Recorder()
    PagesAhead(tensors, take=taken).join(30)
    first = [tensor.data_ptr() for tensor in tensors]
    assert taken.addresses[:2] == first
    assert taken.addresses[2:4] == [address + PAGE_BYTES for address in first]


def test_a_system_without_such_pages_is_asked_once() -> None:
    (tensor,) = cache_tensors(64)
    taken = Recorder(fails_at=2)
    pages = PagesAhead([tensor], ahead_bytes=16 * BLOCK_BYTES, take=taken)
    for block in range(64):
        pages.reach(block)
        pages.join(30)
    assert len(taken.addresses) == 2


def test_a_step_that_writes_to_new_blocks_asks_for_the_next_ones(native: NativeCPUBackend) -> None:
    spec = FullAttentionSpec(16, 2, 64, "float32")
    cache = native.allocate_kv_cache(KVCacheConfig((KVCacheGroup(spec, (0,), 1024),)))
    tensor, taken = cache.tensors[0], Recorder()
    native._pages = PagesAhead([tensor], ahead_bytes=100 * tensor[0].nbytes, take=taken)
    native._pages.join(30)
    native.build_attention_metadata(
        AttentionBatch(
            query_starts=np.array([0, 1, 2]),
            context_lens=np.array([0, 15]),
            block_tables=np.array([[400], [700]]),
            slot_mapping=np.array([400 * 16, 700 * 16 + 15]),
            block_size=16,
            sliding_window=None,
        )
    )
    native._pages.join(30)
    assert max(taken.addresses) == tensor[799].data_ptr() // PAGE_BYTES * PAGE_BYTES


def test_layers_share_the_pages_between_them(native: NativeCPUBackend) -> None:
    """With a mapping for every two of them, a cache of 1,000 blocks took 20 MB more than its bytes."""
    spec = FullAttentionSpec(16, 2, 64, "float32")
    num_layers, num_blocks = 7, 1200
    config = KVCacheConfig((KVCacheGroup(spec, tuple(range(num_layers)), num_blocks),))
    taken = Recorder()
    pages = PagesAhead(list(native.allocate_kv_cache(config).tensors.values()), take=taken)
    pages.join(30)
    assert len(set(taken.addresses)) <= config.num_bytes // PAGE_BYTES + 2


def test_a_process_that_ends_meanwhile_ends_well() -> None:
    """It was aborted: the thread came back to an interpreter that had gone, inside of a library that allows no end."""
    script = """
import atexit, threading
atexit.register(lambda: print([thread.name for thread in threading.enumerate()]))  # the last to be called
import torch
from ksana.kernels.cpu.huge_pages import HugePageArena
from ksana.kernels.cpu.pages_ahead import PagesAhead
arena = HugePageArena()
tensors = [arena.allocate(2**20).view(1024, -1) for _ in range(16)]
def take(address, num_bytes):
    torch.ones(30_000_000).sum()
pages = PagesAhead(tensors, take=take)
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout == "['MainThread']\n"
