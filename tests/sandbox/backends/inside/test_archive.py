"""Archives that a container of a trajectory writes, and another one unpacks."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from verl_tool.sandbox.backends.inside import archive

pytestmark = pytest.mark.timeout(60)

SOURCE = Path(archive.__file__).read_text()


def run(*arguments: object, before: str = "", stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    """Run the module as a container does: from its source, with no import of the project."""
    program = f"{before}\n{SOURCE}\nrun{arguments!r}\n"
    return subprocess.run([sys.executable, "-I", "-c", program], input=stdin, capture_output=True, check=False)


Member = tuple[str, bytes, str]
"""Name, type, and the content or the target of a link."""


def packed(members: list[Member]) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as tar:
        for name, kind, content in members:
            member = tarfile.TarInfo(name.strip("/"))
            member.type, member.uid, member.gid = kind, os.geteuid(), os.getegid()
            member.mode = 0o755 if kind == tarfile.DIRTYPE else 0o644
            if kind == tarfile.REGTYPE:
                member.size = len(content)
            else:
                member.linkname = content
            tar.addfile(member, io.BytesIO(content.encode()))
    return stream.getvalue()


def test_files_of_all_kinds_arrive_as_they_were(tmp_path: Path) -> None:
    work = tmp_path / "work"
    (work / "d" / "e").mkdir(parents=True)
    (work / "d" / "a").write_text("one")
    os.link(work / "d" / "a", work / "d" / "e" / "hard")
    (work / "soft").symlink_to("/etc/passwd")
    (work / "folder").symlink_to("d")
    (work / "d" / "a").chmod(0o640)
    (work / "d" / "e").chmod(0o500)
    stream = run("pack", (str(work),))
    assert (stream.returncode, stream.stderr) == (0, b"")
    (work / "late").write_text("gone afterwards")
    done = run("unpack", (str(work),), (str(work),), stdin=stream.stdout)
    assert (done.returncode, done.stderr) == (0, b"")
    assert sorted(os.listdir(work)) == ["d", "folder", "soft"]
    assert (work / "d" / "e" / "hard").stat().st_ino == (work / "folder" / "a").stat().st_ino
    assert ((work / "d" / "a").stat().st_mode & 0o777, (work / "d" / "e").stat().st_mode & 0o777) == (0o640, 0o500)
    assert os.readlink(work / "soft") == "/etc/passwd"


def test_a_work_folder_may_be_behind_a_link_of_the_image(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "work").symlink_to("data")
    done = run("unpack", (f"{tmp_path}/work/",), (), stdin=packed([(f"{tmp_path}/work/a", tarfile.REGTYPE, "x")]))
    assert (done.returncode, done.stderr) == (0, b"")
    assert (tmp_path / "data" / "a").read_text() == "x"


@pytest.mark.parametrize(
    "members",
    [
        [("{}/tests/test.sh", tarfile.REGTYPE, "forged")],
        [("{}/work/../tests/test.sh", tarfile.REGTYPE, "forged")],
        [("{}/workshop", tarfile.REGTYPE, "forged")],
        [("{}/work", tarfile.SYMTYPE, "tests")],
        [("{}/work/link", tarfile.SYMTYPE, "../tests"), ("{}/work/link/test.sh", tarfile.REGTYPE, "forged")],
        [("{}/work/link", tarfile.SYMTYPE, "../tests/test.sh"), ("{}/work/link", tarfile.REGTYPE, "forged")],
        [("{}/work/link", tarfile.SYMTYPE, "../tests"), ("{}/work/link", tarfile.DIRTYPE, "")],
        [("{}/work/hard", tarfile.LNKTYPE, "{}/tests/test.sh"), ("{}/work/hard", tarfile.REGTYPE, "forged")],
        [("{}/work/link", tarfile.SYMTYPE, "../tests"), ("{}/work/hard", tarfile.LNKTYPE, "{}/work/link/test.sh")],
        [("{}/work/link", tarfile.SYMTYPE, "../tests/test.sh"), ("{}/work/hard", tarfile.LNKTYPE, "{}/work/link")],
        [("{}/work/pipe", tarfile.FIFOTYPE, "")],
    ],
)
def test_a_forged_archive_changes_nothing_outside_its_folders(tmp_path: Path, members: list[Member]) -> None:
    for name in ("work", "tests"):
        (tmp_path / name).mkdir()
    (tmp_path / "tests" / "test.sh").write_text("real")
    where = str(tmp_path)
    stream = packed(
        [(n.format(where), k, c.format(where.strip("/")) if k == tarfile.LNKTYPE else c) for n, k, c in members]
    )
    done = run("unpack", (f"{where}/work",), (), stdin=stream)
    assert done.returncode == 1
    assert where.encode() in done.stderr
    assert sorted(os.listdir(tmp_path)) == ["tests", "work"]
    assert (tmp_path / "tests" / "test.sh").read_text() == "real"
    assert (tmp_path / "tests" / "test.sh").stat().st_nlink == 1
    assert not {"hard", "pipe"} & {*os.listdir(tmp_path / "work")}


def test_no_library_of_the_container_looks_up_names_of_owners(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("x")
    trap = (
        "import os, tarfile\n"
        "class Trap:\n"
        "    def __getattr__(self, name):\n"
        "        os._exit(7)\n"
        "tarfile.pwd = tarfile.grp = Trap()\n"
    )
    stream = run("pack", (str(tmp_path),), before=trap)
    assert stream.returncode == 0
    assert run("unpack", (str(tmp_path),), (str(tmp_path),), before=trap, stdin=stream.stdout).returncode == 0
    assert (tmp_path / "a").read_text() == "x"
