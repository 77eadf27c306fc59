"""Tasks as they lie in folders."""

from __future__ import annotations

from pathlib import Path

import pytest

from verl_tool.content.packed_files import PackedFile, pack, unpack
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
        ("task.toml", "[verifier]\ntimeout_sec = 15000", "at timeout_seconds: .* less than or equal to 14400"),
        ("instruction.md", None, "there is no instruction.md"),
        ("instruction.md", "\n", "instruction.md is empty"),
        ("tests/test.sh", None, "there is no tests/test.sh"),
        ("solution/solve.sh", None, "there is no solution/solve.sh"),
        ("environment/Dockerfile", "ENTRYPOINT make", "line 1: ENTRYPOINT is not run here"),
        ("environment/docker-compose.yaml", "services: {main: }", "builds a Dockerfile, and there is none"),
        ("environment/docker-compose.yaml", "services: {db: }", "the service 'db' is not supported"),
        ("trajectory.json", "[]", "trajectory.json is not supported"),
        ("tests/.harborignore", "wanted.txt", "tests/.harborignore is not supported"),
        ("tests/test.sh", "#!/usr/bin/env python3\n", "tests/test.sh begins with '#!/usr/bin/env python3'"),
        ("environment/model.bin", "version https://git-lfs.github.com/spec/v1\noid", "a pointer of git lfs"),
    ],
)
def test_a_malformed_task_is_told(folder: Path, path: str, text: str | None, told: str) -> None:
    (folder / path).unlink(missing_ok=True)
    if text is not None:
        (folder / path).write_text(text)
    with pytest.raises(ConfigError, match=f"task .*count: .*{told}"):
        read_task(folder)


@pytest.mark.parametrize(
    ("path", "text", "reason"),
    [
        ("environment/Dockerfile", "FROM debian\nWORKDIR /app\nCOPY data .\nRUN make", "line 4: RUN needs an image"),
        ("environment/Dockerfile", "FROM debian\nCOPY data /srv/", "is not in the workspace"),
        ("task.toml", "[environment]\ndocker_image = 'a:1'", "docker_image is a:1, and there is no Dockerfile"),
        ("task.toml", "[environment]\nenv = {A = '1'}\nworkdir = '/srv'", "env is set; environment.workdir is set"),
        ("task.toml", "[agent]\nuser = 'ada'\n[verifier]\nuser = 'ada'", "agent.user is set"),
        ("task.toml", "[verifier]\nuser = 'root'", "verifier.user is set"),
    ],
)
def test_tasks_that_need_an_image(folder: Path, path: str, text: str, reason: str) -> None:
    (folder / path).write_text(text)
    task = read_task(folder)
    assert reason in task.needs_image
    assert task.context == folder / "environment"
    assert task.packed_files() == ("" if path.endswith("Dockerfile") else pack(folder / "environment"))


def test_an_image_takes_the_place_of_a_dockerfile(folder: Path) -> None:
    (folder / "environment" / "Dockerfile").write_text("FROM debian\nENTRYPOINT make")
    (folder / "task.toml").write_text("[environment]\ndocker_image = 'a:1'")
    assert "ENTRYPOINT is not run here" in read_task(folder).needs_image
    (folder / "environment" / "Dockerfile").unlink()
    (folder / "environment" / "compose.yaml").write_text("services: {db: }")
    assert read_task(folder).image == "a:1", "Harbor reads docker-compose.yaml only"


def test_a_training_needs_no_solution(folder: Path) -> None:
    (folder / "solution" / "link").symlink_to("solve.sh")
    with pytest.raises(ConfigError, match="is a link"):
        read_task(folder)
    assert read_task(folder, with_solution=False).solution == {}


def test_a_task_with_a_network_needs_a_container(folder: Path) -> None:
    (folder / "task.toml").write_text("[environment]\nallow_internet = true")
    with pytest.raises(ConfigError, match=r"environment\.allow_internet is true"):
        read_task(folder)
    assert not read_task(folder, offline=True).needs_image
    task = read_task(folder, network=True)
    assert (task.allowed_hosts, task.verifier_hosts, task.needs_image) == (("*",), ("*",), "it requests a network")
    (folder / "task.toml").write_text("[environment]\nnetwork_mode = 'no-network'\n[verifier]\nnetwork_mode = 'public'")
    task = read_task(folder, network=True)
    assert (task.allowed_hosts, task.verifier_hosts, task.needs_image) == ((), ("*",), "it requests a network")
    (folder / "task.toml").write_text("")
    assert not read_task(folder).verifier_hosts
    assert read_task(folder, network=True).verifier_hosts == ("*",), "as in Harbor"


def test_what_an_image_can_have_and_a_row_cannot(folder: Path) -> None:
    (folder / "environment" / "link").symlink_to("data")
    with pytest.raises(ConfigError, match="is a link"):
        read_task(folder)
    (folder / "environment" / "Dockerfile").write_text("FROM debian\nWORKDIR /app\nCOPY data .")
    assert "cannot be packed: " in read_task(folder).needs_image


def test_build_steps_are_ignored_on_demand(folder: Path) -> None:
    (folder / "environment" / "Dockerfile").write_text("FROM debian\nWORKDIR /app\nRUN make\nCOPY data .")
    task = read_task(folder, ignore_build=True)
    assert (task.needs_image, set(task.files)) == ("", {"in.txt"})


def test_marks_of_provenance_are_not_part_of_the_instruction(folder: Path) -> None:
    (folder / "instruction.md").write_text("<!-- harbor-canary GUID 1 -->\n# Canary 2\n\n# Count\nCanaries.\n")
    assert read_task(folder).instruction == "# Count\nCanaries."


def test_folders_of_tasks(folder: Path) -> None:
    assert task_folders(folder) == task_folders(folder.parent) == [folder]
    (folder.parent / "half").mkdir()
    assert task_folders(folder.parent) == [folder, folder.parent / "half"], "what is no task is told when it is read"
    with pytest.raises(ConfigError, match="holds no tasks"):
        task_folders(folder / "tests")
    (folder / "tests" / "dataset.toml").touch()
    with pytest.raises(ConfigError, match=r"dataset\.toml names packages of Harbor's registry"):
        task_folders(folder / "tests")


def test_the_tasks_of_this_repository_are_read() -> None:
    tasks = [read_task(path) for path in task_folders(SHIPPED)]
    assert len(tasks) >= 30
    for task in tasks:
        assert task.solution
        assert bool(task.needs_image) == task.name.startswith("image-") == (not task.files)
