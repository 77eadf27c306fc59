"""Files of a session from outside: what paths may name, and that no link leads away."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from verl_tool.sandbox.session.files import SessionFiles

pytestmark = pytest.mark.slow


@pytest.fixture
def files(tmp_path: Path) -> Iterator[SessionFiles]:
    for name in ("work", "tmp", "shm"):
        (tmp_path / name).mkdir()
    files = SessionFiles(os.open(tmp_path, os.O_PATH), 100)
    yield files
    files.close()


@pytest.mark.parametrize(
    ("path", "where"),
    [
        ("a.txt", "work/a.txt"),
        ("d/e/../f", "work/d/f"),
        ("/box/work/a", "work/a"),
        ("/tmp/a", "tmp/a"),
        ("../tmp/a", "tmp/a"),
        ("/dev/shm/a", "shm/a"),
    ],
)
def test_paths(files: SessionFiles, tmp_path: Path, path: str, where: str) -> None:
    files.write(path, b"one")
    files.write(path, b"2")
    assert (tmp_path / where).read_bytes() == b"2"
    assert files.read(path) == b"2"


@pytest.mark.parametrize("path", ["/etc/passwd", "../../x", "/box/x", "/tmp", ".", "", "/tmp/../box/x", "a\0b"])
def test_other_paths_are_refused(files: SessionFiles, path: str) -> None:
    with pytest.raises(PermissionError, match="not a file in the session's folder"):
        files.read(path)


def test_links_and_other_kinds_of_files_are_refused(files: SessionFiles, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "x").write_text("secret")
    (tmp_path / "work" / "link").symlink_to(outside / "x")
    (tmp_path / "work" / "folder").symlink_to(outside)
    (tmp_path / "work" / "real").mkdir()
    os.mkfifo(tmp_path / "work" / "fifo")
    for path in ("link", "folder/x"):
        with pytest.raises(OSError, match=r"symbolic links|Not a directory"):
            files.read(path)
        with pytest.raises(OSError, match=r"symbolic links|Not a directory"):
            files.write(path, b"")
    with pytest.raises(IsADirectoryError):
        files.read("real")
    with pytest.raises(OSError, match=r"not a plain file|No such device"):
        files.write("fifo", b"")
    with pytest.raises(FileNotFoundError, match="absent"):
        files.read("absent")
    assert (outside / "x").read_text() == "secret"


def test_sizes(files: SessionFiles, tmp_path: Path) -> None:
    with pytest.raises(OSError, match="101 bytes are more than 100"):
        files.write("a", bytes(101))
    (tmp_path / "work" / "b").write_bytes(bytes(101))
    with pytest.raises(OSError, match="101 bytes are more than 100"):
        files.read("b")
