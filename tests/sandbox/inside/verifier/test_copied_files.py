"""What is removed from a verifier's copy of a workspace, and which workspaces are large."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from verl_tool.sandbox.inside.verifier import copied_files


@pytest.fixture
def work(tmp_path: Path) -> Path:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "expected").write_text("42")
    (tmp_path / "usr").mkdir()
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "in.txt").write_text("in")
    return tmp_path / "work"


def clean(work: Path) -> set[str]:
    """Names of what stays."""
    copied_files.clean([str(work)], [str(work.parent / "tests"), "/proc", "/dev"], None)
    return set(os.listdir(work))


@pytest.mark.parametrize(
    "target",
    [
        "{root}/tests/expected",
        "../tests/absent",
        "../usr/../tests",
        "/proc/self/cwd/expected",
        "/proc/self/cwd/../work/in.txt",
        "/dev/stdin",
        "/usr/../proc/self/fd/0",
        "/",
        "{root}",
        "{root}/work/../work/../tests/expected",
    ],
)
def test_links_that_lead_outside_are_removed(work: Path, target: str) -> None:
    (work / "answer").symlink_to(target.format(root=work.parent))
    assert clean(work) == {"in.txt"}


@pytest.mark.parametrize(
    "target", ["in.txt", "absent", "loop", "../work/in.txt", "../usr", "{root}/work", "/usr/bin/env"]
)
def test_links_that_lead_elsewhere_stay(work: Path, target: str) -> None:
    (work / "loop").symlink_to("loop")
    (work / "answer").symlink_to(target.format(root=work.parent))
    assert clean(work) == {"in.txt", "answer", "loop"}


def test_links_over_links_and_what_is_no_file_are_removed(work: Path) -> None:
    (work / "far").symlink_to(work.parent / "usr")
    (work / "near").symlink_to("far/../tests")
    (work / "deep").mkdir()
    (work / "deep" / "check").symlink_to("../far/../tests/expected")
    os.mkfifo(work / "pipe")
    (work / "deep").chmod(0o500)
    assert clean(work) == {"in.txt", "far", "deep"}
    assert os.listdir(work / "deep") == []


@pytest.mark.parametrize("target", ["tests", "/proc/self/cwd", "/"])
def test_a_folder_that_leads_outside_is_named(work: Path, target: str) -> None:
    other = work.parent / "other"
    other.symlink_to(work.parent / target)
    with pytest.raises(RuntimeError, match="other is a link that leads"):
        copied_files.clean([str(other)], [str(work.parent / "tests"), "/proc"], None)


def test_a_folder_within_others_that_are_not_its_own(work: Path) -> None:
    (work / "answer").symlink_to("../usr")
    (work / "up").symlink_to("../work/in.txt")
    copied_files.clean([str(work)], [str(work.parent)], None)
    assert set(os.listdir(work)) == {"in.txt", "up"}


def test_a_folder_may_be_a_link(work: Path) -> None:
    other = work.parent / "other"
    other.symlink_to("work")
    (work / "answer").symlink_to("../tests/expected")
    (work / "fine").symlink_to(other / "in.txt")
    copied_files.clean([str(other)], [str(work.parent / "tests")], None)
    assert set(os.listdir(work)) == {"in.txt", "fine"}


def test_links_elsewhere_are_removed_too(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root, home = work.parent, work.parent / "home"
    home.mkdir()
    (home / "result").symlink_to(root / "tests" / "expected")
    (home / "null").mkdir()
    (home / "null" / "mounted").symlink_to("/dev/null")
    (home / "python").symlink_to("/usr/bin/python3")
    walk = copied_files._walk
    monkeypatch.setattr(copied_files, "_walk", lambda path, *rest: walk(str(root) if path == "/" else path, *rest))
    monkeypatch.setattr(copied_files, "_mount_points", lambda: {str(home / "null")})
    copied_files.clean([str(work)], [str(root / "tests"), "/dev"], os.geteuid())
    assert set(os.listdir(home)) == {"null", "python"}
    assert os.listdir(home / "null") == ["mounted"], "another file system"


def test_how_large_folders_are(work: Path) -> None:
    assert not copied_files.is_large([str(work)], 2, 1)
    assert copied_files.is_large([str(work)], 1, 1)
    (work / "locked").mkdir()
    (work / "locked" / "sparse").touch()
    os.truncate(work / "locked" / "sparse", 1 << 30)
    (work / "locked").chmod(0)
    assert copied_files.is_large([str(work)], 1 << 29, 10)
    assert not copied_files.is_large([str(work)], 1 << 31, 10)
    assert copied_files.is_large([str(work)], 1 << 31, 2)


def test_of_an_image_only_what_was_changed_makes_it_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    walk = copied_files._walk
    monkeypatch.setattr(copied_files, "_walk", lambda path, *rest: walk(str(tmp_path) if path == "/" else path, *rest))
    (tmp_path / "image").write_bytes(b"x" * 100)
    since = time.time() + 0.05
    time.sleep(0.1)
    assert copied_files.is_large(("/",), 50, 9)
    assert not copied_files.is_large(("/",), 50, 9, since)
    os.utime(tmp_path / "image", (0, 0))
    assert copied_files.is_large(("/",), 50, 9, since), "whatever date a program gives it"


def test_mount_points_are_found() -> None:
    assert "/proc" in copied_files._mount_points()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_it_reads_no_further_module(work: Path) -> None:
    """Run as in a container: without the right to read Python's own files, or those that were changed."""
    checks = Path(copied_files.__file__).read_text()
    code = f"""
import os, stat, sys
os.seteuid(65534)
sys.meta_path.clear()
{checks}
print(bool(_mount_points()), is_large([{str(work)!r}], 1 << 50, 9), clean([{str(work)!r}], ["/proc"], None))
"""
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("True False None\n", "")


def test_it_needs_no_newer_python_than_3_8() -> None:
    ast.parse(Path(copied_files.__file__).read_text(), feature_version=(3, 8))


def test_links_in_folders_that_cannot_be_listed_are_removed(work: Path) -> None:
    hidden = work / "hidden"
    hidden.mkdir()
    (hidden / "answer").symlink_to(work.parent / "tests" / "expected")
    hidden.chmod(0o300)
    clean(work)
    assert not (hidden / "answer").is_symlink()
    assert hidden.stat().st_mode & 0o700 == 0o700


def test_links_that_take_too_long_to_follow_are_an_error(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copied_files, "_MAX_NAMES", 1000)
    for number in range(3):
        (work / f"link{number}").symlink_to("d/../" * 300 + f"link{number + 1}")
    with pytest.raises(RuntimeError, match="too long to follow"):
        clean(work)


@pytest.mark.skipif(os.geteuid() != 0, reason="another user's files are made by root")
def test_links_to_what_the_user_cannot_read_are_removed(tmp_path: Path) -> None:
    user = 65530
    for above in (tmp_path, *tmp_path.parents):
        if above.stat().st_mode & 0o077 == 0:  # pytest's own
            os.chmod(above, 0o755)
    places = {name: tmp_path / name for name in ("open", "half", "closed", "work", "own")}
    for place in places.values():
        place.mkdir()
        (place / "file").write_text("x")
    os.chmod(places["closed"], 0o700)
    os.chmod(places["half"] / "file", 0o600)
    for place in (places["work"], places["own"]):
        os.chown(place, user, user)
    links = {
        "to_file": places["open"] / "file",
        "to_folder": places["open"],
        "to_own": places["own"],
        "nowhere": tmp_path / "nothing",
        "to_closed_file": places["half"] / "file",
        "to_half": places["half"],
        "to_closed": places["closed"],
        "below_closed": places["closed"] / "file",
    }
    for name, target in links.items():
        (places["work"] / name).symlink_to(target)
    code = (
        f"{Path(copied_files.__file__).read_text()}\nimport sys\n"
        "_mount_points = lambda: {'/' + name for name in os.listdir('/')}\n"
        f"os.setresgid({user}, {user}, {user}); os.setresuid({user}, {user}, {user})\n"
        f"remove_closed_links([{str(places['work'])!r}], float(sys.argv[1]))\n"
    )
    program = Path("/usr/bin/python3") if Path("/usr/bin/python3").exists() else Path(sys.executable)
    late = subprocess.run([str(program), "-I", "-c", code, "0"], capture_output=True, text=True, check=False)
    assert "the links take too long to follow" in late.stderr, late.stderr
    subprocess.run([str(program), "-I", "-c", code, "60"], check=True)
    assert {path.name for path in places["work"].iterdir()} == {"file", "to_file", "to_folder", "to_own", "nowhere"}
