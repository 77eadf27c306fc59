"""The check of tasks, on this repository's own and on wrong ones, in the real sandbox."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from containers import REAL_IMAGE, real
from typer.testing import CliRunner

import verl_tool.tasks
from verl_tool.content.packed_files import PackedFile
from verl_tool.sandbox import SandboxPool
from verl_tool.servers.tools.workspace.layout import started
from verl_tool.servers.tools.workspace.verifier import verify
from verl_tool.tasks.__main__ import app
from verl_tool.tasks.task import read_task, task_folders

SHIPPED = Path(__file__).parents[2] / "examples" / "tasks"
SHIPPED_ATTACKS = Path(verl_tool.tasks.__file__).parent / "attack_scripts"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]


def checked(folder: Path, *options: str) -> tuple[int, str]:
    """Exit code, and the output without the breaks of the table's lines."""
    result = CliRunner().invoke(app, ["check", str(folder), *options], env={"COLUMNS": "400"})
    return result.exit_code, " ".join(result.output.split())


def test_some_tasks_of_this_repository_are_right(tmp_path: Path) -> None:
    for name in ("find-value", "git-conflict", "merge-ranges"):
        shutil.copytree(SHIPPED / name, tmp_path / name)
    code, told = checked(tmp_path)
    assert code == 0, told
    assert told.count("right") == 3


@pytest.mark.e2e
@pytest.mark.timeout(1200)
def test_all_tasks_of_this_repository_are_right_that_need_no_image(tmp_path: Path) -> None:
    for folder in task_folders(SHIPPED):
        if not read_task(folder).needs_image:
            shutil.copytree(folder, tmp_path / folder.name)
    code, told = checked(tmp_path)
    assert code == 0, told


@pytest.mark.timeout(400)
def test_a_task_in_a_container(tmp_path: Path) -> None:
    podman = ("--backend", real("podman"), "--base_image", f"*={REAL_IMAGE}")
    task = shutil.copytree(SHIPPED / "image-environment", tmp_path / "image-environment")
    dockerfile = (task / "environment" / "Dockerfile").read_text().partition("RUN useradd")[0]  # few images have it
    (task / "environment" / "Dockerfile").write_text(f"{dockerfile}RUN chown 65534:65534 /app\nUSER 65534:65534\n")
    code, told = checked(tmp_path, *podman)
    assert code == 0, told
    assert "programs are root" not in told
    shutil.copytree(SHIPPED / "find-value", tmp_path / "find-value")
    broken = tmp_path / "image-environment" / "environment" / "Dockerfile"
    broken.write_text("FROM debian:12\nRUN echo no way; exit 3")
    code, told = checked(tmp_path, *podman)
    assert code == 1
    assert "task image-environment: the image cannot be built (exit code 3; the build has no network" in told
    assert told.count("right") == 1


SERVES = """
echo hello > index.html
nohup python3 -m http.server 80 > /dev/null 2>&1 &
sleep 1
touch /etc/made
exit 3
"""
ASKS = """
import os, urllib.request
assert urllib.request.urlopen("http://127.0.0.1/", timeout=5).read() == b"hello\\n"
"""
AS_IN_HARBOR = """
set -e
test -e /etc/made
test "$HOME" = /root
test -z "$PYTHONSAFEPATH"
echo "made = 1" > module.py
python3 -c "import module"
"""


@pytest.mark.timeout(400)
def test_verifiers_see_what_they_are_told_to(tmp_path: Path) -> None:
    """Root's task, whose working folder no image has; its solution leaves a server, and an exit code."""
    task = tmp_path / "serve"
    files = {
        "task.toml": "[environment]\nmemory_mb = 512.0\nnetwork_mode = 'no-network'",
        "instruction.md": "Serve hello.",
        "environment/Dockerfile": "FROM any\nRUN true\nWORKDIR /app/new\n",
        "solution/solve.sh": SERVES,
        "tests/test.sh": f"{AS_IN_HARBOR}\npython3 /tests/ask.py\necho 1 > /logs/verifier/reward.txt\n",
        "tests/ask.py": ASKS,
    }
    for path, text in files.items():
        (task / path).parent.mkdir(parents=True, exist_ok=True)
        (task / path).write_text(text)
    podman = ("--backend", real("podman"), "--base_image", f"*={REAL_IMAGE}")
    code, told = checked(tmp_path, *podman, "--shared_verifier")
    assert code == 0, told
    code, told = checked(tmp_path, *podman)
    assert (code, "solution/solve.sh: exit code 3" in told, "programs are root" in told) == (1, True, True)
    (task / "tests" / "ask.py").write_text("import in_workspace")
    assert checked(tmp_path, *podman)[0] == 1
    code, told = checked(tmp_path, *podman, "--trust_image")
    assert (code, "programs are root" in told) == (0, False), told
    for option in ("--trust_image", "--shared_verifier"):
        code, told = checked(tmp_path, option)
        assert (code, "are for containers; add --backend" in told) == (2, True)


@pytest.mark.e2e
@pytest.mark.timeout(1200)
def test_all_tasks_of_this_repository_are_right_in_images(tmp_path: Path) -> None:
    image = os.environ.get("VERL_TOOL_TASK_IMAGE")
    if not image:
        pytest.skip("VERL_TOOL_TASK_IMAGE must name an image of podman with apt-get, useradd, git and python3")
    podman = ("--backend", real("podman"), "--base_image", f"*={image}")
    for folder in task_folders(SHIPPED):
        if read_task(folder).needs_image:
            shutil.copytree(folder, tmp_path / folder.name)
    attacks = SHIPPED_ATTACKS / "image_programs.toml"
    code, told = checked(tmp_path, *podman, "--build_network", "host", "--attack", str(attacks))
    assert code == 0, told


def test_what_is_not_supported_is_listed_for_each_task(tmp_path: Path) -> None:
    keys = {"gpus": "gpus = 1", "network": "network_mode = 'public'", "skills": "skills_dir = '/s'"}
    for name, line in keys.items():
        task = shutil.copytree(SHIPPED / "find-value", tmp_path / name) / "task.toml"
        task.write_text(task.read_text().replace("[environment]", f"[environment]\n{line}"))
    shutil.copytree(SHIPPED / "image-environment", tmp_path / "image")
    code, told = checked(tmp_path, "--offline")
    assert code == 1
    assert (told.count("not run"), told.count("right")) == (3, 1)
    for words in (
        "environment.gpus and",
        "environment.skills_dir is",
        "in a container with --backend podman or docker",
    ):
        assert words in told


def test_tasks_in_a_repository(tmp_path: Path) -> None:
    shutil.copytree(SHIPPED / "find-value", tmp_path / "work" / "sets" / "find-value")
    for words in ("init -q -b main", "add -A", "-c user.name=a -c user.email=b commit -qm x"):
        subprocess.run(["git", *words.split()], cwd=tmp_path / "work", check=True)
    subprocess.run(["git", "clone", "-q", "--bare", "work", "tasks.git"], cwd=tmp_path, check=True)
    code, told = checked(tmp_path / "tasks.git", "--subfolder", "sets")
    assert code == 0, told
    assert "find-value" in told


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
