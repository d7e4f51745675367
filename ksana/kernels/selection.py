"""Choosing the kernel backend."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ksana.errors import UsageError

if TYPE_CHECKING:
    from ksana.kernels.base import KernelBackend
    from ksana.types.config import KernelConfig

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class KernelBackendInfo:
    """What a plugin registers for a backend.

    Attributes:
        name: for ``--backend``.
        device_type: torch device type.
        priority: ``auto`` takes the highest that works; the builtin CPU backend has 0.
        probe: returns None if the backend works on this machine, else why not. May import the device's libraries.
        create: makes the backend; called once, for the chosen one.
    """

    name: str
    device_type: str
    priority: int
    probe: Callable[[], str | None]
    create: Callable[[KernelConfig], KernelBackend]


def select_backend(infos: Iterable[KernelBackendInfo], wanted: str) -> KernelBackendInfo:
    """The backend called ``wanted``, or for ``auto`` the one of highest priority that works.

    Raises:
        UsageError: no backend of that name, or it does not work here; it never falls back.
    """
    by_name = _index(infos)
    if wanted != "auto":
        if wanted not in by_name:
            raise UsageError(f"no kernel backend is called {wanted!r}; installed: {', '.join(sorted(by_name))}")
        reason = _why_not(by_name[wanted])
        if reason is not None:
            raise UsageError(f"kernel backend {wanted!r} does not work here: {reason}")
        return by_name[wanted]
    chosen = None
    for info in sorted(by_name.values(), key=lambda info: (-info.priority, info.name)):
        reason = _why_not(info)
        logger.info("kernel backend %-8s priority %3d  %s", info.name, info.priority, reason or "ok")
        if reason is None and chosen is None:
            chosen = info
    if chosen is None:
        raise UsageError(f"none of the kernel backends works here: {', '.join(sorted(by_name)) or 'none is installed'}")
    return chosen


def _why_not(info: KernelBackendInfo) -> str | None:
    """A probe that raises (a half installed driver) says no as well as one that returns a reason."""
    try:
        return info.probe()
    except Exception as error:
        return f"its probe raised {type(error).__name__}: {error}"


def _index(infos: Iterable[KernelBackendInfo]) -> dict[str, KernelBackendInfo]:
    by_name: dict[str, KernelBackendInfo] = {}
    for info in infos:
        if info.name in by_name:
            raise UsageError(f"two plugins register a kernel backend called {info.name!r}; disable one of them")
        by_name[info.name] = info
    return by_name
