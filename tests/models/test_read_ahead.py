"""Reading weights ahead of the model: order, memory, errors, and the numbers themselves."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from ksana.models.weights.gguf_file import GGUFFile
from ksana.models.weights.gguf_reader import _bfloat16_bits
from ksana.models.weights.read_ahead import ReadAhead

Tiny = Callable[..., Path]


def test_results_come_in_order_and_before_anybody_asks() -> None:
    made = threading.Event()
    ahead = ReadAhead([(1, partial(int, "1")), (1, partial(int, "2")), (1, made.set)], max_bytes=10)
    assert made.wait(10)
    assert list(ahead) == [1, 2, None]


def test_no_more_than_the_limit_is_made_ahead() -> None:
    made: list[int] = []
    ahead = iter(ReadAhead([(4, partial(made.append, index)) for index in range(6)], max_bytes=9))
    next(ahead)
    next(ahead)
    # Two taken, and as many waiting as fit into 9 bytes. The thread may not have got there yet, but never further.
    assert len(made) <= 4
    assert list(ahead) == [None] * 4 and made == list(range(6))


def test_a_result_larger_than_the_limit_is_made_all_the_same() -> None:
    assert list(ReadAhead([(100, partial(int, "1")), (100, partial(int, "2"))], max_bytes=9)) == [1, 2]


def test_an_error_is_raised_in_its_place_and_ends_the_thread() -> None:
    def fail() -> int:
        raise ValueError("broken")

    before = threading.active_count()
    results = iter(ReadAhead([(1, partial(int, "1")), (1, fail), (1, partial(int, "3"))], max_bytes=10))
    assert next(results) == 1
    with pytest.raises(ValueError, match="broken"):
        next(results)
    for thread in threading.enumerate():
        if thread.name.startswith("ksana-read"):
            thread.join(10)
    assert threading.active_count() <= before


def test_rounding_to_bfloat16_is_that_of_torch() -> None:
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 2**32, 200_000, dtype=np.uint64).astype(np.uint32)
    edges = [0, 0x80000000, 0x7F7FFFFF, 0x7F800000, 0xFF800000, 0x7FFFFFFF, 0x7F800001, 0x3F808000, 0x3F818000, 1]
    numbers = np.concatenate([bits, np.array(edges, np.uint32)]).view(np.float32)
    ours = torch.from_numpy(_bfloat16_bits(numbers).astype(np.uint16).view(np.int16)).view(torch.bfloat16)
    theirs = torch.from_numpy(numbers).to(torch.bfloat16)
    assert torch.equal(ours.isnan(), theirs.isnan())
    finite = ~theirs.isnan()
    assert torch.equal(ours[finite].view(torch.int16), theirs[finite].view(torch.int16))


def test_a_file_in_use_is_shared_and_a_changed_one_read_again(
    tiny: Tiny, write_gguf: Callable[..., Path], tmp_path: Path
) -> None:
    path = write_gguf(tiny("llama"), tmp_path / "m.gguf", "llama")
    first = GGUFFile.open(path)
    assert GGUFFile.open(path) is first
    os.utime(path, ns=(1, 1))
    assert GGUFFile.open(path) is not first


def test_weights_are_read_before_torch_is_there() -> None:
    """Importing torch takes longer than decoding: what makes the reader import it makes every start slower."""
    code = (
        "import sys; import ksana.engine.async_engine, ksana.server.run, ksana.models.weights.gguf_reader; "
        "print('torch' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (result.stdout.strip(), result.stderr) == ("False", "")
