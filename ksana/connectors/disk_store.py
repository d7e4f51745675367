"""Blocks in files of a folder: they survive the process, and other engines on the machine find them."""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import os
import re
import stat
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ksana.connectors.block_file import DamagedBlockError, file_size, read_block, write_block
from ksana.connectors.block_store import BlockStore
from ksana.connectors.transfer_threads import TransferThreads
from ksana.errors import UsageError

if TYPE_CHECKING:
    from ksana.connectors.block_store import BlockBuffers

logger = logging.getLogger(__name__)

_SAFE_KEY = re.compile(r"[0-9A-Za-z-]{1,200}")
_SUFFIX = ".kv"
_UNFINISHED_SUFFIX = ".part"
_OUR_NAME = re.compile(r"[0-9A-Za-z-]+(\.kv|\.[0-9]+-[0-9]+\.part)")
_UNFINISHED_AGE_S = 3600.0
"""What nobody has finished for so long, nobody will."""
_SHORTAGES = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})
"""Errors that say nothing about the file."""
_PAUSE_S = 5.0
"""After a failure to write, nothing is written for so long."""
_CLEARING_TIMEOUT_S = 1.0
"""Who has something to write waits so long for older files to be removed."""
_STOP_TIMEOUT_S = 3.0


class DiskStore(BlockStore):
    """Blocks as files, the longest unused removed first when they become too many.

    The folder is the truth, and others may use it, or empty it, at any time: what is known of it only saves looking.
    A file has its name from the moment it is complete. What cannot be written is not stored, what cannot be read is not
    there, and the log says so once.

    Args:
        folder: made if need be, for its owner alone.
        max_bytes: of all files in it, those of other models and of earlier processes included. Engines that share a
            folder keep to it by looking at the whole of it again whenever one has written an eighth of this.
        prefix: what the keys of this engine begin with; :meth:`clear` leaves others alone.

    Raises:
        UsageError: there can be no such folder.
    """

    def __init__(self, folder: Path, max_bytes: int, prefix: str = "") -> None:
        self._folder = folder
        self._max_bytes = max_bytes
        self._prefix = prefix
        self._sizes: OrderedDict[str, int] = OrderedDict()  # by key, the longest unused first
        self._num_bytes = 0
        self._unseen_bytes = max_bytes  # at most so much more than we know of has been written to the folder
        self._paused_until = 0.0
        self._warned: set[str] = set()
        self._numbers = itertools.count()
        # Two engines in containers may have the same process number.
        self._name = int.from_bytes(os.urandom(8), "big")
        self._lock = threading.Lock()
        self._cleared = threading.Condition(self._lock)
        self._num_clears = 0  # asked for
        self._num_cleared = 0  # done
        self._thread = TransferThreads(1, "ksana-kv-disk")
        try:
            self._make_folder()
            if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
                raise PermissionError(0, "no permission")
        except OSError as error:
            reason = "it is not a folder" if isinstance(error, FileExistsError) else error.strerror
            raise UsageError(f"no KV cache on disk at {folder}: {reason}; see --kv-disk-path") from None

    @property
    def num_bytes(self) -> int:
        """Bytes of the files that are known."""
        return self._num_bytes

    def contains(self, keys: Sequence[str]) -> int:
        """Looks at the folder for what is not known yet: another engine may have stored it."""
        if self._is_clearing():
            return 0
        for count, key in enumerate(keys):
            if key not in self._sizes and not self._discover(key):
                return count
        return len(keys)

    def touch(self, keys: Sequence[str]) -> list[bool]:
        return [self._touch(key) for key in keys]

    def get(self, keys: Sequence[str], buffers: Sequence[BlockBuffers]) -> list[bool]:
        return [self._read(key, block) for key, block in zip(keys, buffers, strict=True)]

    def put(self, keys: Sequence[str], buffers: Sequence[BlockBuffers]) -> list[bool]:
        return [self._touch(key) or self._write(key, block) for key, block in zip(keys, buffers, strict=True)]

    def clear(self) -> None:
        """Forget this engine's namespace at once; a thread removes its files, some milliseconds for each hundred."""
        with self._lock:
            self._num_clears += 1
        self._thread.submit(self._remove_all, priority=0)

    def close(self) -> None:
        self._thread.stop(_STOP_TIMEOUT_S)

    def _is_clearing(self) -> bool:
        """True while files are there that nobody shall find."""
        return self._num_cleared < self._num_clears

    def _remove_all(self) -> None:
        try:
            self._scan()
            with self._lock:
                keys = [key for key in self._sizes if key.startswith(self._prefix)]
            for key in keys:
                self._remove(key)
        finally:
            with self._cleared:
                self._num_cleared += 1
                self._cleared.notify_all()

    def _path(self, key: str) -> Path:
        assert _SAFE_KEY.fullmatch(key), f"{key!r} is no name for a file"
        return self._folder / (key + _SUFFIX)

    def _make_folder(self) -> None:
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def _discover(self, key: str) -> bool:
        try:
            status = self._path(key).lstat()
        except OSError:
            return False
        if not stat.S_ISREG(status.st_mode):
            return False
        self._remember(key, status.st_size)
        return True

    def _touch(self, key: str) -> bool:
        """Whether the file is there; if so, it has been used just now, for all engines that share the folder."""
        if self._is_clearing() or (key not in self._sizes and not self._discover(key)):
            return False
        try:
            os.utime(self._path(key))
        except FileNotFoundError:
            self._forget(key)
            return False
        except OSError as error:
            self._warn("touched", error)
        with self._lock, contextlib.suppress(KeyError):
            self._sizes.move_to_end(key)
        return True

    def _read(self, key: str, block: BlockBuffers) -> bool:
        if self._is_clearing():
            return False
        try:
            descriptor = os.open(self._path(key), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                read_block(descriptor, key, block)
            finally:
                os.close(descriptor)
        except FileNotFoundError:
            self._forget(key)
            return False
        except OSError as error:
            self._warn("read", error)
            if error.errno in _SHORTAGES:
                self._forget(key)
            else:
                self._remove(key)  # or it would be found again and again, and never come
            return False
        except DamagedBlockError as error:
            self._warn("used", error)
            self._remove(key)
            return False
        return self._touch(key)

    def _write(self, key: str, block: BlockBuffers) -> bool:
        size = file_size(key, block)
        if size > self._max_bytes or time.monotonic() < self._paused_until:
            return False
        with self._cleared:
            if not self._cleared.wait_for(lambda: not self._is_clearing(), _CLEARING_TIMEOUT_S):
                self._paused_until = time.monotonic() + _PAUSE_S
                return False
            num_clears = self._num_clears
        self._make_room(size)
        path = self._path(key)
        unfinished = path.with_name(f"{key}.{self._name}-{next(self._numbers)}{_UNFINISHED_SUFFIX}")
        try:
            self._write_file(unfinished, key, block)
            unfinished.replace(path)
        except OSError as error:
            self._paused_until = time.monotonic() + _PAUSE_S
            self._warn("written", error)
            with contextlib.suppress(OSError):
                unfinished.unlink(missing_ok=True)
                self._make_folder()
            return False
        self._remember(key, size)
        if num_clears != self._num_clears:
            self._remove(key)  # it is from before
            return False
        return True

    def _write_file(self, path: Path, key: str, block: BlockBuffers) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        descriptor = os.open(path, flags, 0o600)
        try:
            write_block(descriptor, key, block)
        finally:
            os.close(descriptor)

    def _make_room(self, size: int) -> None:
        with self._lock:
            self._unseen_bytes += size
            must_look = self._unseen_bytes > self._max_bytes // 8
        if must_look:
            self._scan()
        while self._num_bytes + size > self._max_bytes:
            with self._lock:
                oldest = next(iter(self._sizes), None)
            if oldest is None:
                return
            self._remove(oldest)

    def _scan(self) -> None:
        """Look at the whole folder: what is there, in the order in which it was last used."""
        with self._lock:
            self._unseen_bytes = 0
        found = []
        try:
            with os.scandir(self._folder) as entries:
                for entry in entries:
                    if _OUR_NAME.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
                        with contextlib.suppress(FileNotFoundError):
                            status = entry.stat(follow_symlinks=False)
                            found.append((status.st_mtime, entry.name, status.st_size))
        except OSError as error:
            self._warn("looked at", error)
        found.sort()
        too_old = time.time() - _UNFINISHED_AGE_S
        for modified, name, _ in found:
            if name.endswith(_UNFINISHED_SUFFIX) and modified < too_old:
                with contextlib.suppress(OSError):
                    (self._folder / name).unlink()
        sizes = OrderedDict((name.removesuffix(_SUFFIX), size) for _, name, size in found if name.endswith(_SUFFIX))
        with self._lock:
            self._sizes = sizes
            self._num_bytes = sum(sizes.values())

    def _remember(self, key: str, size: int) -> None:
        with self._lock:
            self._num_bytes += size - self._sizes.get(key, 0)
            self._sizes[key] = size

    def _forget(self, key: str) -> None:
        with self._lock:
            self._num_bytes -= self._sizes.pop(key, 0)

    def _remove(self, key: str) -> None:
        self._forget(key)
        with contextlib.suppress(OSError):
            self._path(key).unlink(missing_ok=True)

    def _warn(self, what: str, error: Exception) -> None:
        if what not in self._warned:
            self._warned.add(what)
            reason = getattr(error, "strerror", None) or error
            logger.warning("a block of the KV cache in %s cannot be %s: %s (said once)", self._folder, what, reason)
