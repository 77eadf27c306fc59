"""Which folders of PATH a trajectory cannot have changed."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from verl_tool.sandbox.backends.inside.trusted_paths import Reach, is_trusted

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="files of other users are made by root")
USER, GROUP = 65530, 65529
Trusts = Callable[..., bool]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A file system that is root's, with a home of the user, and a folder of programs."""
    os.chmod(tmp_path, 0o755)
    for path in ("bin", "home/own", "data/app/bin", "etc"):
        (tmp_path / path).mkdir(parents=True)
    (tmp_path / "bin" / "sh").write_text("")
    os.chown(tmp_path / "home", USER, 0)
    return tmp_path


@pytest.fixture
def trusts(root: Path, monkeypatch: pytest.MonkeyPatch) -> Trusts:
    """Whether a folder is trusted, of a user (None: nobody's) and folders that are not. What lies above `root`, which
    is pytest's own, counts as root's."""
    reject = Reach.reject

    def below(self: Reach, path: str) -> None:
        if Path(path).is_relative_to(root):
            reject(self, path)

    monkeypatch.setattr(Reach, "reject", below)

    def ask(folder: str, user: int | None = USER, changed: tuple[str, ...] = ()) -> bool:
        return bool(is_trusted(f"{root}/{folder}", Reach([f"{root}/{each}" for each in changed], user, (GROUP,))))

    return ask


def test_what_is_root_s_is_trusted(root: Path, trusts: Trusts) -> None:
    assert trusts("bin")
    assert trusts("bin", None)
    assert not trusts("nowhere")
    assert not is_trusted("bin", Reach([], None, ()))
    assert not is_trusted("", Reach([], None, ()))


def test_what_the_user_may_change_is_not(root: Path, trusts: Trusts) -> None:
    assert not trusts("home/own"), "its parent is the user's, who can put another one there"
    assert trusts("home/own", None)
    os.chmod(root / "bin", 0o777)
    assert not trusts("bin")
    os.chmod(root / "bin", 0o775)
    assert trusts("bin")
    os.chown(root / "bin", 0, GROUP)
    assert not trusts("bin")


def test_programs_in_it_count_too(root: Path, trusts: Trusts) -> None:
    (root / "bin" / "python").symlink_to(root / "home" / "own" / "python")
    assert not trusts("bin"), "nothing is there, and the user can put something there"
    (root / "bin" / "python").unlink()
    (root / "bin" / "python").symlink_to(root / "etc" / "python")
    assert trusts("bin"), "nothing is there, and nobody can put something there"
    os.chown(root / "bin" / "sh", USER, 0)
    assert not trusts("bin")


def test_ways_are_followed_as_the_kernel_does(root: Path, trusts: Trusts) -> None:
    (root / "home" / "way").symlink_to(root / "data" / "app")
    (root / "etc" / "to").symlink_to(root / "home" / "way")
    (root / "etc" / "bin").symlink_to("to/../../bin")
    assert not trusts("etc/bin"), "through a link of the user's"
    (root / "etc" / "near").symlink_to("../bin")
    assert trusts("etc/near")
    (root / "etc" / "endless").symlink_to("endless")
    assert not trusts("etc/endless")
    previous = root / "bin"
    for number in range(60):
        (root / "etc" / f"l{number}").symlink_to(previous)
        previous = root / "etc" / f"l{number}"
    assert trusts("etc/l30")
    assert not trusts("etc/l59")


@pytest.mark.parametrize("user", [USER, None])
def test_folders_that_are_copied_are_not_by_any_name(root: Path, trusts: Trusts, user: int | None) -> None:
    (root / "app").symlink_to("data/app")
    for name in ("app", "app/", "data/app", "data/../data/app"):
        for folder in ("app/bin", "data/app/bin"):
            assert not trusts(folder, user, (name,)), (name, folder)
    assert trusts("bin", user, ("app",))
    (root / "bin" / "python").symlink_to(root / "app" / "bin" / "python")
    assert not trusts("bin", user, ("app",)), "a program of it"
