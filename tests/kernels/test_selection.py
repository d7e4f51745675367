"""Which kernel backend is taken."""

from __future__ import annotations

import logging

import pytest

from ksana.errors import UsageError
from ksana.kernels.base import KernelBackend
from ksana.kernels.selection import KernelBackendInfo, select_backend
from ksana.types.config import KernelConfig


def backend(name: str, priority: int = 0, broken: str | None = None) -> KernelBackendInfo:
    return KernelBackendInfo(name, "cpu", priority, probe=lambda: broken, create=create)


def create(config: KernelConfig) -> KernelBackend:
    raise AssertionError("choosing must not create")


def raising(name: str, priority: int) -> KernelBackendInfo:
    def probe() -> str | None:
        raise OSError("libdevice.so: cannot open shared object file")

    return KernelBackendInfo(name, "cpu", priority, probe, create)


def test_auto_takes_the_highest_priority_that_works() -> None:
    infos = [backend("cpu"), backend("fast", 100, broken="no device"), backend("medium", 50)]
    assert select_backend(infos, "auto").name == "medium"


def test_auto_does_not_depend_on_the_order_of_registration() -> None:
    infos = [backend("b", 5), backend("a", 5), backend("c", 1)]
    assert select_backend(infos, "auto").name == select_backend(infos[::-1], "auto").name == "a"


def test_auto_says_why_not(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        select_backend([backend("cpu"), backend("fast", 100, broken="no device")], "auto")
    assert "fast" in caplog.text
    assert "no device" in caplog.text


def test_named_backend_is_taken_whatever_its_priority() -> None:
    assert select_backend([backend("cpu"), backend("fast", 100)], "cpu").name == "cpu"


def test_named_backend_never_falls_back() -> None:
    with pytest.raises(UsageError, match="'fast' does not work here: no device"):
        select_backend([backend("cpu"), backend("fast", 100, broken="no device")], "fast")


def test_unknown_name_lists_the_installed_ones() -> None:
    with pytest.raises(UsageError, match="no kernel backend is called 'cuda'; installed: cpu, fast"):
        select_backend([backend("fast"), backend("cpu")], "cuda")


def test_two_of_one_name_are_an_error() -> None:
    with pytest.raises(UsageError, match="two plugins register a kernel backend called 'cpu'"):
        select_backend([backend("cpu"), backend("cpu", 1)], "auto")


def test_nothing_works() -> None:
    with pytest.raises(UsageError, match="none of the kernel backends works here: fast"):
        select_backend([backend("fast", broken="no device")], "auto")
    with pytest.raises(UsageError, match="none is installed"):
        select_backend([], "auto")


def test_probe_that_raises_is_a_backend_that_does_not_work() -> None:
    """A half installed driver must not keep the machine from serving on its CPU."""
    infos = [backend("cpu"), raising("fast", 100)]
    assert select_backend(infos, "auto").name == "cpu"
    with pytest.raises(UsageError, match=r"'fast' does not work here: its probe raised OSError: libdevice\.so"):
        select_backend(infos, "fast")
