"""Blocks in files of a folder."""

from __future__ import annotations

import errno
import os
import resource
import stat
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ksana.connectors import disk_store
from ksana.connectors.block_file import file_size
from ksana.connectors.disk_store import DiskStore
from ksana.errors import UsageError
from ksana.testing.waiting import wait_until

LAYERS, SIZE = 3, 1000


def block(value: int) -> list[np.ndarray]:
    return [np.full(SIZE, value + layer, dtype=np.uint8) for layer in range(LAYERS)]


def read(store: DiskStore, key: str) -> int | None:
    """The value that the block was made of, or None if it does not come."""
    found = block(0)
    if store.get([key], [found]) != [True]:
        return None
    assert [int(layer[0]) - i for i, layer in enumerate(found)] == [int(found[0][0])] * LAYERS
    return int(found[0][0])


def put(store: DiskStore, *keys: str) -> list[bool]:
    return store.put(keys, [block(ord(key[-1])) for key in keys])


def files(folder: Path) -> set[str]:
    return {path.stem for path in folder.iterdir()}


FILE_SIZE = file_size("k-a", block(0))


def test_blocks_outlive_the_store_and_are_removed_in_the_order_of_their_use(tmp_path: Path) -> None:
    store = DiskStore(tmp_path / "kv", 3 * FILE_SIZE)
    assert put(store, "k-a", "k-b", "k-c") == [True] * 3
    for age, key in enumerate(("k-c", "k-b", "k-a")):
        os.utime(tmp_path / "kv" / f"{key}.kv", times=(1000 - age, 1000 - age))
    assert stat.S_IMODE((tmp_path / "kv").stat().st_mode) == 0o700

    store = DiskStore(tmp_path / "kv", 3 * FILE_SIZE)
    assert store.contains(["k-a", "k-b", "k-c", "k-d"]) == 3
    assert read(store, "k-a") == ord("a")
    assert put(store, "k-d") == [True]
    assert files(tmp_path / "kv") == {"k-a", "k-c", "k-d"}, "k-b was the longest unused, since k-a has just been read"
    assert put(store, "k-e") == [True]
    assert files(tmp_path / "kv") == {"k-a", "k-d", "k-e"}
    assert store.num_bytes == 3 * FILE_SIZE == sum(path.stat().st_size for path in (tmp_path / "kv").iterdir())


def test_use_is_seen_by_the_next_process(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, 2 * FILE_SIZE)
    put(store, "k-a", "k-b")
    for key in ("k-a", "k-b"):
        os.utime(tmp_path / f"{key}.kv", times=(1000, 1000))
    assert store.touch(["k-a", "k-x"]) == [True, False]
    put(DiskStore(tmp_path, 2 * FILE_SIZE), "k-c")
    assert files(tmp_path) == {"k-a", "k-c"}


def cut_off(path: Path) -> None:
    os.truncate(path, FILE_SIZE - 1)


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-SIZE] ^= 4
    path.write_bytes(content)


def empty(path: Path) -> None:
    path.write_bytes(b"")


def of_another_key(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b"k-a", b"k-b"))


def of_another_version(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[8] += 1
    path.write_bytes(content)


def lengthened(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"x")


@pytest.mark.parametrize("damage", [cut_off, flip_a_bit, empty, of_another_key, of_another_version, lengthened])
def test_a_damaged_file_is_a_miss_and_goes(tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: object) -> None:
    store = DiskStore(tmp_path, 100 * FILE_SIZE)
    put(store, "k-a", "k-b")
    for name in ("k-a.kv", "k-b.kv"):
        damage(tmp_path / name)  # type: ignore[operator]
    assert read(store, "k-a") is None
    if damage is not of_another_key:
        assert read(store, "k-b") is None
    assert not (tmp_path / "k-a.kv").exists()
    assert store.contains(["k-a"]) == 0
    assert len(caplog.records) == 1, "one warning, however many files"
    assert put(store, "k-a") == [True]
    assert read(store, "k-a") == ord("a")


def test_a_block_of_another_shape_is_damaged(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, 100 * FILE_SIZE)
    put(store, "k-a")
    assert store.get(["k-a"], [[np.empty(SIZE * LAYERS, dtype=np.uint8)]]) == [False]


def test_a_file_that_has_gone_is_a_miss(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = DiskStore(tmp_path, 100 * FILE_SIZE)
    put(store, "k-a", "k-b")
    (tmp_path / "k-a.kv").unlink()
    assert read(store, "k-a") is None
    (tmp_path / "k-b.kv").unlink()
    assert store.touch(["k-b"]) == [False]
    assert caplog.records == [], "it is what other engines do"
    assert put(store, "k-a") == [True]


@pytest.mark.parametrize(("number", "is_kept"), [(errno.EACCES, False), (errno.EIO, False), (errno.EMFILE, True)])
def test_a_file_that_cannot_be_read_is_not_found_again_and_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, is_kept: bool
) -> None:
    """Every request with that prefix would wait for a load that fails; unless it is not the file that fails."""
    store, real = DiskStore(tmp_path, 100 * FILE_SIZE), os.open
    put(store, "k-a")

    def fail(path: str, flags: int, *arguments: int) -> int:
        if flags & os.O_ACCMODE == os.O_RDONLY:
            raise OSError(number, "planted")
        return real(path, flags, *arguments)

    monkeypatch.setattr(os, "open", fail)
    assert read(store, "k-a") is None
    assert store.contains(["k-a"]) == is_kept
    monkeypatch.undo()
    assert put(store, "k-a") == [True]
    assert read(store, "k-a") == ord("a")


def test_without_its_folder_the_store_stores_nothing_and_says_so_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "kv"
    store = DiskStore(folder, 100 * FILE_SIZE)
    put(store, "k-a")
    (folder / "k-a.kv").unlink()
    folder.rmdir()
    assert put(store, "k-b", "k-c") == [False, False]
    assert read(store, "k-a") is None
    assert len(caplog.records) == 1
    later = time.monotonic() + 60
    monkeypatch.setattr(time, "monotonic", lambda: later)
    assert put(store, "k-b") == [True], "the folder is made anew"


def test_on_a_full_disk_nothing_is_stored_and_nothing_left_behind(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = DiskStore(tmp_path, 100 * FILE_SIZE)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_SIZE // 2, limits[1]))  # fails like a disk: in the middle
    try:
        assert put(store, "k-a", "k-b") == [False, False]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert files(tmp_path) == set()
    assert len(caplog.records) == 1


def test_what_is_in_the_way_of_a_file_stays(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "k-a.kv").mkdir()
    store = DiskStore(tmp_path, 100 * FILE_SIZE)
    assert store.contains(["k-a"]) == 0
    assert put(store, "k-a") == [False]
    assert read(store, "k-a") is None
    assert [path.name for path in tmp_path.iterdir()] == ["k-a.kv"]
    assert {record.levelname for record in caplog.records} == {"WARNING"}


def test_a_folder_that_cannot_be_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"no KV cache on disk at .*file: it is not a folder; see --kv-disk-path"):
        DiskStore(tmp_path / "file", FILE_SIZE)


def test_two_engines_on_one_folder_see_each_other_and_keep_to_the_bound(tmp_path: Path) -> None:
    first, second = DiskStore(tmp_path, 16 * FILE_SIZE), DiskStore(tmp_path, 16 * FILE_SIZE)
    put(first, "k-a")
    assert second.contains(["k-a"]) == 1
    assert read(second, "k-a") == ord("a")
    for number in range(100):
        for store, name in ((first, "f"), (second, "s")):
            key = f"{name}{number:03}-a"
            assert put(store, key) == [True]
            assert read(store, key) == ord("a")
            assert len(files(tmp_path)) <= 16 + 2 * 3, "an eighth of it each unseen by the other, and one more"


def test_what_others_left_unfinished_is_removed(tmp_path: Path) -> None:
    (tmp_path / "k-a.123-4.part").write_bytes(b"old")
    os.utime(tmp_path / "k-a.123-4.part", times=(1000, 1000))
    (tmp_path / "k-b.123-5.part").write_bytes(b"being written")
    (tmp_path / "somebody's own.kv").write_bytes(b"not ours")
    put(DiskStore(tmp_path, 100 * FILE_SIZE), "k-c")
    assert {path.name for path in tmp_path.iterdir()} == {"k-b.123-5.part", "somebody's own.kv", "k-c.kv"}


def test_clearing_leaves_other_models_alone(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, 100 * FILE_SIZE, "mine-")
    put(store, "mine-a", "theirs-a")
    put(DiskStore(tmp_path, 100 * FILE_SIZE), "mine-b")
    store.clear()
    wait_until(lambda: files(tmp_path) == {"theirs-a"})
    store.close()


def test_clearing_keeps_nobody_waiting_and_nothing_is_found_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine's thread asks for it; there may be a hundred thousand files."""
    store, goes_on, scan = DiskStore(tmp_path, 100 * FILE_SIZE), threading.Event(), DiskStore._scan
    put(store, "k-a", "k-b")
    monkeypatch.setattr(DiskStore, "_scan", lambda self: goes_on.wait(60) and scan(self))
    store.clear()
    assert store.contains(["k-a"]) == 0
    assert read(store, "k-a") is None
    assert store.touch(["k-a"]) == [False]
    monkeypatch.setattr(disk_store, "_CLEARING_TIMEOUT_S", 0.01)
    assert put(store, "k-c", "k-d") == [False, False], "not even what is new, if it takes long"
    goes_on.set()
    wait_until(lambda: files(tmp_path) == set())
    store.close()


def test_what_is_being_written_when_all_is_cleared_goes_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, write = DiskStore(tmp_path, 100 * FILE_SIZE), disk_store.write_block

    def write_and_clear(*arguments: Any) -> None:
        write(*arguments)
        store.clear()
        store.close()

    monkeypatch.setattr(disk_store, "write_block", write_and_clear)
    assert put(store, "k-a") == [False]
    assert files(tmp_path) == set()


def test_two_engines_write_the_same_block_at_the_same_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They may have the same process number too: in containers it is 1."""
    first, second = DiskStore(tmp_path, 100 * FILE_SIZE), DiskStore(tmp_path, 100 * FILE_SIZE)
    write, stored = disk_store.write_block, []

    def write_both(*arguments: Any) -> None:
        write(*arguments)
        monkeypatch.setattr(disk_store, "write_block", write)
        stored.extend(put(second, "k-a"))

    monkeypatch.setattr(disk_store, "write_block", write_both)
    assert put(first, "k-a") == stored == [True]
    assert read(first, "k-a") == read(second, "k-a") == ord("a")
    assert files(tmp_path) == {"k-a"}


def test_a_key_that_is_no_name_is_refused(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, 100 * FILE_SIZE)
    with pytest.raises(AssertionError):
        put(store, "../k-a")
