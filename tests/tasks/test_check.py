"""The check of tasks, on this repository's own and on wrong ones, in the real sandbox."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from verl_tool.content.packed_files import PackedFile
from verl_tool.sandbox import SandboxPool
from verl_tool.servers.tools.workspace.layout import started
from verl_tool.servers.tools.workspace.verifier import verify
from verl_tool.tasks.__main__ import app
from verl_tool.tasks.task import read_task

SHIPPED = Path(__file__).parents[2] / "examples" / "tasks"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]


def checked(folder: Path, *options: str) -> tuple[int, str]:
    """Exit code, and the output without the breaks of the table's lines."""
    result = CliRunner().invoke(app, ["check", str(folder), *options], env={"COLUMNS": "400"})
    return result.exit_code, " ".join(result.output.split())


def test_the_tasks_of_this_repository_are_right() -> None:
    code, told = checked(SHIPPED)
    assert code == 0, told
    assert told.count("right") == 6


def test_wrong_tasks_are_told(tmp_path: Path) -> None:
    wrong = {
        "unsolved": ("solution/solve.sh", "true", "the solution got 0 in place of 1 at attempt 1"),
        "given-away": ("tests/test.sh", "echo 1 > /logs/verifier/reward.txt", "doing nothing got 1 in place of 0"),
        "fails": ("solution/solve.sh", "echo no way; exit 4", "solution/solve.sh: exit code 4: no way"),
        "silent": ("tests/test.sh", "true", "the verifier wrote neither reward.json nor reward.txt"),
        "malformed": ("task.toml", "version =", "task.toml is no TOML"),
        "lone": ("solution/solve.sh", None, "there is no solution/solve.sh, so that nobody knows"),
        "good": ("instruction.md", "Find it.", "right"),
    }
    for name, (path, text, _) in wrong.items():
        shutil.copytree(SHIPPED / "find-value", tmp_path / name)
        if text is None:
            shutil.rmtree((tmp_path / name / path).parent)
        else:
            (tmp_path / name / path).write_text(text)
    code, told = checked(tmp_path)
    assert code == 1
    for name, (_, _, words) in wrong.items():
        assert words in told, name


def test_attacks_that_get_a_reward_are_listed(tmp_path: Path) -> None:
    attacks = tmp_path / "attacks.toml"
    attacks.write_text(
        '["a link"]\nshell = "ln -s /tests/right answer.txt"\n["a guess"]\nshell = "echo 6484 > answer.txt"\n'
    )
    tests = shutil.copytree(SHIPPED / "find-value", tmp_path / "tasks" / "guessed") / "tests"
    (tests / "right").write_text("6484\n")
    (tests / "test.sh").write_text("cmp answer.txt /tests/right; echo $((! $?)) > /logs/verifier/reward.txt")
    code, told = checked(tmp_path / "tasks", "--attack", str(attacks))
    assert code == 1
    assert "a guess got 1.0" in told
    assert "a link got" not in told
    code, told = checked(tmp_path / "tasks", "--attack", str(tmp_path / "absent.toml"))
    assert code == 2
    assert "cannot be read" in told


FORGE = "open('/logs/verifier/reward.json', 'w').write('{\"reward\": 1}')"
HOSTILE = {
    "writes a reward and ends": f"import os\n{FORGE}\nos._exit(0)",
    "ends the check": f"import os, signal\n{FORGE}\nos.kill(os.getppid(), signal.SIGKILL)",
    "goes on writing a reward": (
        "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n        os.close(1)\n"
        f"        while True:\n            try: {FORGE}\n            except OSError: pass"
    ),
    "takes the wanted values": "import sys\nsys.path.insert(0, '/tests')\nfrom check import median",
    "looks into the check": "import os\nopen(f'/proc/{os.getppid()}/mem', 'rb')\n" + FORGE,
    "prints what is wanted": "print('null')\nimport os\nos._exit(0)",
}


@pytest.mark.parametrize("how", HOSTILE)
async def test_code_that_is_checked_has_no_way_to_the_reward(how: str) -> None:
    task = read_task(SHIPPED / "repair-function")
    async with SandboxPool(workers=1, warm_modules=(), for_sessions=True) as pool:
        session = await started(pool, None, {"statistics_of.py": PackedFile(HOSTILE[how].encode())})
        try:
            verdict = await verify(session, task.verification)
        finally:
            await session.close()
    assert verdict.reward == 0.0, verdict


def test_nothing_to_check(tmp_path: Path) -> None:
    code, told = checked(tmp_path)
    assert code == 2
    assert "holds no tasks" in told
