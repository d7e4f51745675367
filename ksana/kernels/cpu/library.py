"""The shared library of native CPU kernels, which ``setup.py`` builds into this folder."""

from __future__ import annotations

import ctypes
import logging
import os
from functools import cache
from pathlib import Path

from ksana.errors import UsageError

logger = logging.getLogger(__name__)

ABI_VERSION = 7
"""What ``ksana_cpu_abi()`` of the library must return. Raised, here and in ``csrc``, whenever an entry point or a
structure changes, so that a library of other sources is refused rather than called with the wrong arguments."""

LIBRARY_VARIABLE = "KSANA_CPU_LIBRARY"
"""Environment variable: path of another library than the packaged one, such as a build with sanitizers."""

PACKAGED_LIBRARY = Path(__file__).with_name("_native.so")


@cache
def load_library() -> ctypes.CDLL | None:
    """The library, loaded by the first call; None, and one line in the log, if there is none that works here.

    Raises:
        UsageError: ``KSANA_CPU_LIBRARY`` names a library that does not work.
    """
    if wanted := os.environ.get(LIBRARY_VARIABLE, "").strip():
        try:
            return _open(Path(wanted))
        except OSError as error:
            raise UsageError(f"environment variable {LIBRARY_VARIABLE}: {error}") from error
    try:
        return _open(PACKAGED_LIBRARY)
    except OSError as error:
        logger.warning(
            "native CPU kernels are not available (%s); using torch, which is slower: reinstall with a C++ compiler",
            error,
        )
        return None


def _open(path: Path) -> ctypes.CDLL:
    """Raises OSError, with a message that names the file, for one that is missing, broken or of other sources."""
    if not path.is_file():
        raise OSError(f"there is no file {path}")
    library = ctypes.CDLL(str(path.resolve()))  # a bare name would be looked for in the system's folders
    try:
        abi = library.ksana_cpu_abi
    except AttributeError:
        raise OSError(f"{path} is no library of Ksana's CPU kernels") from None
    abi.argtypes, abi.restype = [], ctypes.c_int
    if (found := abi()) != ABI_VERSION:
        raise OSError(f"{path} was built from other sources: its interface is {found}, this version's is {ABI_VERSION}")
    return library
