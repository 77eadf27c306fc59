"""Tasks as they lie in folders."""

from __future__ import annotations

from pathlib import Path

import pytest

from verl_tool.content.packed_files import PackedFile, unpack
from verl_tool.errors import ConfigError
from verl_tool.tasks.task import read_task, task_folders

SHIPPED = Path(__file__).parents[2] / "examples" / "tasks"
TOML = 'version = "1.0"\n[metadata]\ndifficulty = "easy"\n[verifier]\ntimeout_sec = 7\nenv = {LEVEL = "2"}\n'


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A task that is right."""
    made = tmp_path / "count"
    files = {
        "task.toml": TOML,
        "instruction.md": "Count.\n",
        "environment/data/in.txt": "1",
        "tests/test.sh": "echo 0",
        "tests/wanted.txt": "1",
        "solution/solve.sh": "true",
    }
    for path, text in files.items():
        (made / path).parent.mkdir(parents=True, exist_ok=True)
        (made / path).write_text(text)
    return made


def test_a_task_is_read(folder: Path) -> None:
    task = read_task(folder)
    assert (task.name, task.instruction, task.metadata) == ("count", "Count.", {"difficulty": "easy"})
    assert task.files == unpack(task.packed_files()) == {"data/in.txt": PackedFile(b"1")}
    assert (task.verification.timeout_seconds, task.verification.env) == (7, {"LEVEL": "2"})
    assert set(unpack(task.verification.files)) == {"test.sh", "wanted.txt"}
    assert set(task.solution) == {"solve.sh"}


def test_a_task_needs_neither_files_nor_a_solution(folder: Path) -> None:
    for path in ("environment/data/in.txt", "solution/solve.sh"):
        (folder / path).unlink()
    for path in ("environment/data", "environment", "solution"):
        (folder / path).rmdir()
    task = read_task(folder)
    assert (task.files, task.solution, task.packed_files()) == ({}, {}, "")


@pytest.mark.parametrize(
    ("path", "text", "told"),
    [
        ("task.toml", None, "there is no task.toml"),
        ("task.toml", "version = ", "is no TOML"),
        ("task.toml", "verifier = 1", r"verifier must be a table, as \[verifier\]"),
        ("task.toml", "[verifier]\nmode = 'x'", "verifier.mode is not supported here; known: timeout_sec, env"),
        ("task.toml", "[[steps]]\nname = 'a'", "steps is not supported here"),
        ("task.toml", "[verifier]\ntimeout_sec = -1", "at timeout_seconds: .* greater than 0"),
        ("task.toml", "[agent]\ntimeout_sec = 'long'", "agent.timeout_sec is 'long'"),
        ("task.toml", "[verifier]\nenv = {KEY = '${KEY}'}", "verifier.env.KEY takes a variable of the host"),
        ("task.toml", "[environment]\ngpus = 1", "environment.gpus"),
        ("task.toml", "[environment]\nos = 'windows'", "another environment.os"),
        ("instruction.md", None, "there is no instruction.md"),
        ("instruction.md", "\n", "instruction.md is empty"),
        ("tests/test.sh", None, "there is no tests/test.sh"),
        ("solution/solve.sh", None, "there is no solution/solve.sh"),
        ("environment/Dockerfile", "RUN make", "line 1: RUN needs an image"),
    ],
)
def test_a_malformed_task_is_told(folder: Path, path: str, text: str | None, told: str) -> None:
    (folder / path).unlink(missing_ok=True)
    if text is not None:
        (folder / path).write_text(text)
    with pytest.raises(ConfigError, match=f"task .*count: .*{told}"):
        read_task(folder)


def test_folders_of_tasks(folder: Path) -> None:
    assert task_folders(folder) == task_folders(folder.parent) == [folder]
    (folder.parent / "half").mkdir()
    assert task_folders(folder.parent) == [folder, folder.parent / "half"], "what is no task is told when it is read"
    with pytest.raises(ConfigError, match="holds no tasks"):
        task_folders(folder / "tests")


def test_the_tasks_of_this_repository_are_read() -> None:
    tasks = [read_task(path) for path in task_folders(SHIPPED)]
    assert len(tasks) == 6
    assert all(task.files and task.solution for task in tasks)
