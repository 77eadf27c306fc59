"""Where tasks come from."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from verl_tool.errors import ConfigError
from verl_tool.tasks.task_source import open_source


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A bare repository with two commits on one branch, and a tag at the first."""
    work = tmp_path / "work"
    work.mkdir()
    script = """
    set -e; git init -q -b main .; mkdir sets; echo 1 > sets/a; git add .; git commit -qm one; git tag old
    echo 2 > sets/a; git commit -qam two; git clone -q --bare . ../tasks.git
    """
    names = {f"GIT_{role}_{what}": "a@b" for role in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    subprocess.run(["bash", "-c", script], cwd=work, env={"PATH": "/usr/bin:/bin", **names}, check=True)
    return tmp_path / "tasks.git"


def content(source: object, **options: str) -> str:
    with open_source(str(source), **options) as folder:
        return (folder / "a").read_text().strip()


def test_a_repository_at_a_revision(repository: Path) -> None:
    assert content(repository, subfolder="sets") == "2"
    assert content(repository.as_uri(), subfolder="sets", revision="old") == "1"
    commit = subprocess.run(
        ["git", "rev-parse", "main~1"], cwd=repository, capture_output=True, text=True, check=True
    ).stdout.strip()
    assert content(repository.as_uri(), subfolder="sets", revision=commit) == "1"
    with open_source(str(repository)) as folder:
        assert (folder / "sets").is_dir()
    assert not folder.exists()


def test_a_folder(tmp_path: Path) -> None:
    (tmp_path / "sets").mkdir()
    (tmp_path / "sets" / "a").write_text("3")
    assert content(tmp_path, subfolder="sets") == content(tmp_path / "sets") == "3"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"revision": "absent"}, "at absent cannot be fetched: .*absent"),
        ({"subfolder": "../work"}, "--subfolder ../work is not in"),
        ({"subfolder": "absent"}, "there is no folder absent in"),
    ],
)
def test_what_is_not_in_a_repository(repository: Path, options: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        content(repository, **options)


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        (".", {"revision": "main"}, "is a folder, and --revision main is of a git repository"),
        ("no/such/folder", {}, "there is no folder no/such/folder"),
        ("terminal-bench@2.0", {}, "names of Harbor's registry are not resolved here"),
        ("file:///no/such.git", {}, "cannot be fetched"),
    ],
)
def test_what_is_no_source(source: str, options: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        content(source, **options)
