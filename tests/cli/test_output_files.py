"""Where commands write their results: whole files, and nothing else broken on the way."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from ksana.cli.output_files import check_writable, write_file
from ksana.errors import UsageError


def write(path: Path, text: str = "new") -> None:
    write_file(path, lambda part: part.write_text(text))


def test_a_file_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    file.write_text("old")

    def fail(part: Path) -> None:
        part.write_text("half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_file(file, fail)
    assert file.read_text() == "old"
    write(file)
    assert file.read_text() == "new"
    assert list(tmp_path.iterdir()) == [file]


def test_a_link_stays_one(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    link, file = tmp_path / "latest.json", tmp_path / "real" / "run.json"
    file.write_text("old")
    link.symlink_to(file)
    write(link)
    assert link.is_symlink() and file.read_text() == "new"


def test_a_pipe_is_written_to_and_not_replaced(tmp_path: Path) -> None:
    """As /dev/null is, which root could replace."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        check_writable(pipe)
        write(pipe)
        assert os.read(reader, 100) == b"new"
    finally:
        os.close(reader)
    assert stat.S_ISFIFO(pipe.stat().st_mode)


@pytest.mark.parametrize(("name", "message"), [("no/such.json", "there is no folder"), ("", "it is a folder")])
def test_places_that_are_none(tmp_path: Path, name: str, message: str) -> None:
    for attempt in (check_writable, write):
        with pytest.raises(UsageError, match=rf"cannot write .*{message}"):
            attempt(tmp_path / name)
