"""The hook through which a device joins."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from ksana.markers import hookspec

if TYPE_CHECKING:
    from ksana.kernels.selection import KernelBackendInfo


@hookspec
def ksana_kernel_backends(register: Callable[[KernelBackendInfo], None]) -> None:
    """Register kernel backends by calling ``register`` once for each.

    When: once at start, before a backend is chosen. Not firstresult. Do not import the device's libraries here: that
    is what ``probe`` (returns None if usable, else the reason why not) and ``create`` are for.

    Example::

        @hookimpl
        def ksana_kernel_backends(register):
            register(KernelBackendInfo("cuda", "cuda", priority=100, probe=my_probe, create=my_create))
    """
