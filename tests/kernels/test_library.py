"""Finding, opening and refusing the library of native kernels; building it."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ksana.errors import UsageError
from ksana.kernels.cpu import library
from ksana.kernels.cpu.library import LIBRARY_VARIABLE, PACKAGED_LIBRARY, load_library

ROOT = Path(__file__).parent.parent.parent
REQUIRED = os.environ.get("KSANA_REQUIRE_NATIVE", "") not in ("", "0")

needs_native = pytest.mark.skipif(
    not PACKAGED_LIBRARY.exists() and not REQUIRED, reason="Ksana was installed without a C++ compiler"
)


@pytest.fixture(autouse=True)
def _each_test_loads_anew(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv(LIBRARY_VARIABLE, raising=False)
    load_library.cache_clear()
    yield
    load_library.cache_clear()


@needs_native
def test_the_packaged_library_is_loaded_once(caplog: pytest.LogCaptureFixture) -> None:
    loaded = load_library()
    assert loaded is not None, caplog.text
    assert load_library() is loaded
    assert caplog.records == []


def test_a_missing_library_is_one_line_in_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    missing = tmp_path / "_native.so"
    monkeypatch.setattr(library, "PACKAGED_LIBRARY", missing)
    assert load_library() is None
    assert load_library() is None
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage() == (
        f"native CPU kernels are not available (there is no file {missing}); "
        "using torch, which is slower: reinstall with a C++ compiler"
    )


def test_a_broken_library_does_not_end_the_process(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """Such as one of another processor, or half a file."""
    broken = tmp_path / "_native.so"
    broken.write_bytes(b"\x7fELF and no more")
    monkeypatch.setattr(library, "PACKAGED_LIBRARY", broken)
    assert load_library() is None
    assert str(broken) in caplog.text


@needs_native
def test_a_library_of_other_sources_is_refused(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(library, "ABI_VERSION", library.ABI_VERSION + 1)
    assert load_library() is None
    assert f"its interface is {library.ABI_VERSION - 1}, this version's is {library.ABI_VERSION}" in caplog.text


@needs_native
def test_another_library_can_be_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    other = tmp_path / "other.so"
    shutil.copy(PACKAGED_LIBRARY, other)
    monkeypatch.setenv(LIBRARY_VARIABLE, str(other))
    loaded = load_library()
    assert loaded is not None
    assert loaded._name == str(other.resolve())


@pytest.mark.parametrize("name", ["missing.so", "text.so"])
def test_a_named_library_that_does_not_work_is_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    """Whoever names a library, as the sanitizers do, would measure or check another one without noticing."""
    (tmp_path / "text.so").write_text("no library")
    monkeypatch.setenv(LIBRARY_VARIABLE, str(tmp_path / name))
    with pytest.raises(UsageError, match=rf"{LIBRARY_VARIABLE}: .*{name}"):
        load_library()


def test_a_library_without_our_entry_points_is_no_library_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    import pydantic_core._pydantic_core as foreign

    monkeypatch.setenv(LIBRARY_VARIABLE, str(foreign.__file__))
    with pytest.raises(UsageError, match="is no library of Ksana's CPU kernels"):
        load_library()


def build(target: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "setup.py", "build_ext", "--build-lib", str(target)],
        cwd=ROOT,
        env={**os.environ, "KSANA_REQUIRE_NATIVE": "0", **environment},
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize(("compiler", "reason"), [("no-such-compiler", "does not exist"), ("false", "exit code 1")])
def test_without_a_working_compiler_the_build_warns_and_goes_on(tmp_path: Path, compiler: str, reason: str) -> None:
    stale = tmp_path / "ksana/kernels/cpu/_native.so"
    stale.parent.mkdir(parents=True)
    stale.write_text("built from older sources")
    result = build(tmp_path, CXX=compiler)
    assert result.returncode == 0, result.stderr
    (warning,) = result.stderr.splitlines()
    assert warning.startswith("warning: the native CPU kernels cannot be built")
    assert reason in warning
    assert not stale.exists()


def test_where_the_kernels_are_required_the_build_fails_without_a_compiler(tmp_path: Path) -> None:
    result = build(tmp_path, CXX="no-such-compiler", KSANA_REQUIRE_NATIVE="1")
    assert result.returncode == 1
    assert result.stderr.startswith("error: the native CPU kernels cannot be built")
