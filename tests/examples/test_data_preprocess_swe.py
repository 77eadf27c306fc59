"""Published rows of repositories with issues become rows whose verifier judges the repository.

The rows are hand-made; their columns and the forms of these are those of the data sets: SWE-bench (with and without
`eval_script`), SWE-Gym, SWE-smith, R2E-Gym and NeMo-Gym's. Verifiers run for real, on small repositories.
"""

from __future__ import annotations

import ast
import asyncio
import dataclasses
import importlib.util
import json
import os
import py_compile
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from containers import REAL_IMAGE, real

from verl_tool.content.packed_files import pack, unpack
from verl_tool.protocol import VERIFY_FIELD
from verl_tool.sandbox import SessionLimits
from verl_tool.sandbox.backends import Container, ContainerSettings
from verl_tool.servers.execution.in_process import InProcessTools
from verl_tool.servers.tools import load_tools
from verl_tool.servers.tools.workspace.verifier import verify
from verl_tool.verification import Verdict, Verification, verification_of

pytest.importorskip("datasets")
pd = pytest.importorskip("pandas")

SCRIPTS = Path(__file__).parents[2] / "examples" / "data_preprocess"
pytestmark = [pytest.mark.timeout(120)]

WRONG = "def add(a, b):\n    return a - b\n\n\ndef sub(a, b):\n    return a + b\n\n\ndef mul(a, b):\n    return a * b\n"
RIGHT = WRONG.replace("a - b", "a _ b").replace("a + b", "a - b").replace("a _ b", "a + b")
HALF = WRONG.replace("a - b", "a + b", 1)
OLD_TEST = "from ops import mul\n\n\ndef test_mul():\n    assert mul(2, 3) == 6\n"
NEW_TEST = OLD_TEST.replace("mul\n\n", "add, mul\n\n", 1) + "\n\ndef test_add():\n    assert add(2, 3) == 5\n"
MORE_TEST = "from ops import sub\n\n\ndef test_sub():\n    assert sub(2, 3) == -1\n"
FILES = {"ops.py": WRONG, "tests/test_ops.py": OLD_TEST, "tests/conftest.py": "", "pytest.ini": "[pytest]\n"}
FILES["pytest.ini"] += "pythonpath = .\n"
FAIL = ["tests/test_ops.py::test_add", "tests/test_more.py::test_sub"]
PASS = ["tests/test_ops.py::test_mul"]
EVAL_SCRIPT = """#!/bin/bash
set -uxo pipefail
source /opt/miniconda3/bin/activate
conda activate testbed
cd /testbed
git config --global --add safe.directory /testbed
git status
git show
git -c core.fileMode=false diff {base}
python -m pip --version
git checkout {base} tests/test_ops.py
git apply -v - <<'EOF_114329324912'
{patch}
EOF_114329324912
: '>>>>> Start Test Output'
pytest -rA -p no:cacheprovider tests/test_ops.py tests/test_more.py
: '>>>>> End Test Output'
git checkout {base} tests/test_ops.py
"""


def git(folder: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "init.defaultBranch=main")
    done = subprocess.run(["git", *identity, *arguments], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout


class Repository:
    """A small repository, its commit, and patches of it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.write(FILES)
        git(folder, "init", "-q")
        git(folder, "add", "-A")
        git(folder, "commit", "-qm", "first")
        self.base = git(folder, "rev-parse", "HEAD").strip()

    def write(self, files: Mapping[str, str]) -> None:
        for path, text in files.items():
            (self.folder / path).parent.mkdir(parents=True, exist_ok=True)
            (self.folder / path).write_text(text)

    def patch(self, files: Mapping[str, str]) -> str:
        """Return the patch that makes `files` of the commit."""
        self.write(files)
        git(self.folder, "add", "-A")
        patch = git(self.folder, "diff", "--cached")
        git(self.folder, "reset", "-q", "--hard")
        git(self.folder, "clean", "-qfd")
        return patch


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    (tmp_path / "testbed").mkdir()
    return Repository(tmp_path / "testbed")


@pytest.fixture
def swe(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The script, with its folder on the path, as when it is run, and no hub."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    import swe

    yield swe
    for name in ("swe", "swe_sources", "swe_images", "swe_verifier", "rows"):
        sys.modules.pop(name, None)


def swebench_row(repository: Repository) -> dict[str, Any]:
    test_patch = repository.patch({"tests/test_ops.py": NEW_TEST, "tests/test_more.py": MORE_TEST})
    return {
        **{"repo": "me/ops", "instance_id": "me__ops-1", "base_commit": repository.base, "version": "1.0"},
        **{"patch": repository.patch({"ops.py": RIGHT}), "test_patch": test_patch, "hints_text": ""},
        **{"problem_statement": "add subtracts.", "created_at": "2026-01-01T00:00:00Z", "difficulty": "<15 min fix"},
        **{"FAIL_TO_PASS": json.dumps(FAIL), "PASS_TO_PASS": json.dumps(PASS)},
        **{"environment_setup_commit": repository.base, "log_parser": "parse_log_pytest", "eval_type": "pass_and_fail"},
        "image": "swebench/sweb.eval.x86_64.me_1776_ops-1:latest",
        "eval_script": EVAL_SCRIPT.format(base=repository.base, patch=test_patch.rstrip("\n")),
    }


def swegym_row(repository: Repository) -> dict[str, Any]:
    row = swebench_row(repository)
    own = {"repo": "facebookresearch/hydra", "instance_id": "facebookresearch__hydra-1", "version": "1.4"}
    for name in ("log_parser", "eval_type", "image", "eval_script", "environment_setup_commit", "difficulty"):
        del row[name]
    return {**row, **own, "FAIL_TO_PASS": FAIL, "PASS_TO_PASS": PASS}


def r2e_row(repository: Repository) -> dict[str, Any]:
    log = "=== short test summary info ===\nPASSED r2e_tests/test_1.py::test_mul\n{} r2e_tests/test_1.py::test_add{}\n"
    executed = {
        **{"repo_name": "pyramid", "new_commit_hash": "f" * 40, "setup_res_code": 0, "test_file_names": ["test_1.py"]},
        **{"test_file_codes": [NEW_TEST], "new_commit_res_stdout": log.format("PASSED", "")},
        "old_commit_res_stdout": log.format("FAILED", " - assert -1 == 5"),
    }
    return {
        **{"repo_name": "pyramid", "docker_image": f"namanjain12/pyramid_final:{'f' * 40}", "commit_hash": "f" * 40},
        **{
            "parsed_commit_content": "{}",
            "execution_result_content": json.dumps(executed),
            "modified_files": ["ops.py"],
        },
        **{"problem_statement": "[ISSUE]\nadd subtracts.\n[/ISSUE]", "prompt": "", "num_non_test_files": 1},
        "expected_output_json": json.dumps({"test_mul": "PASSED", "test_add": "PASSED"}),
    }


def smith_row(repository: Repository) -> dict[str, Any]:
    repository.write({"ops.py": RIGHT, "tests/test_add.py": NEW_TEST.replace("test_mul", "test_mul_too")})
    git(repository.folder, "add", "-A")
    git(repository.folder, "commit", "-qm", "Initial commit")
    return {
        **{"instance_id": "me__ops.12345678.func_basic__0", "repo": "swesmith/me__ops.12345678"},
        **{"patch": repository.patch({"ops.py": HALF.replace("a + b", "a - b", 1)}), "created_at": "2025"},
        **{"FAIL_TO_PASS": ["tests/test_add.py::test_add"], "PASS_TO_PASS": PASS},
        **{"image_name": "swesmith.x86_64.me__ops.12345678", "problem_statement": "add subtracts."},
    }


def internal_row(repository: Repository) -> dict[str, Any]:
    base = repository.base
    repository.write({"tests/test_ops.py": NEW_TEST, "ops.py": RIGHT})
    git(repository.folder, "commit", "-qam", "fix")
    fix = git(repository.folder, "rev-parse", "HEAD").strip()
    git(repository.folder, "reset", "-q", "--hard", base)
    parse = (
        "import json, re, sys\nlog = open(sys.argv[1]).read()\n"
        "found = re.findall(r'^(PASSED|FAILED) (\\S+)', log, re.M)\n"
        "json.dump({'tests': [{'name': n, 'status': s} for s, n in found]}, open(sys.argv[3], 'w'))\n"
    )
    instance = {
        **{"base_dockerfile": "FROM x\nENV SHOUT=1", "instance_dockerfile": "ENV KEY value", "base_commit": base},
        "before_repo_set_cmd": f"git reset --hard {base}\ngit checkout {fix} -- tests/test_ops.py",
        **{"selected_test_files_to_run": '["tests/test_ops.py"]', "parsing_script.py": parse},
        "run_script.sh": '#!/bin/bash\necho "KEY is $KEY"\npytest -rA -p no:cacheprovider ${1//,/ }\n',
        **{"fail_to_pass": json.dumps(FAIL[:1]), "pass_to_pass": PASS, "patch": repository.patch({"ops.py": RIGHT})},
    }
    metadata = {
        **{"instance_id": "nv__ops-1", "base_commit": base, "dataset_name": "nv-internal-1", "split": "train"},
        **{"problem_statement": "add subtracts.", "instance_dict": json.dumps(instance)},
        "container_formatter": ["docker://nv/task:{instance_id}"],
    }
    return {"responses_create_params": {"input": [], "metadata": metadata}, "agent_ref": {"name": "swe_agents"}}


Judge = Callable[..., dict[str, Any]]


@pytest.fixture
def judge(swe: ModuleType, repository: Repository, tmp_path: Path) -> Judge:
    """Runs the verifier of a problem on the repository as it is, by plain subprocesses."""

    def run(problem: Any, python: str = sys.executable) -> dict[str, Any]:
        tests = tmp_path / "tests"
        shutil.rmtree(tests, ignore_errors=True)
        for path, content in swe.verifier_files(problem, 60).items():
            (tests / path).parent.mkdir(parents=True, exist_ok=True)
            (tests / path).write_bytes(content)
        spec = json.loads((tests / "spec.json").read_text())
        (tests / "spec.json").write_text(json.dumps({**spec, "workdir": str(repository.folder)}))
        reward = tmp_path / "reward.json"
        reward.unlink(missing_ok=True)
        program = [python, "-I", str(tests / "verify.py"), str(tests / "spec.json"), str(reward)]
        env = {**os.environ, "PYTHONSAFEPATH": "1", "PYTHONPATH": str(tests), "GIT_CONFIG_COUNT": "0"}
        env["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # they are slow to import
        done = subprocess.run(program, env=env, cwd="/", capture_output=True, text=True, timeout=100, check=False)
        numbers = json.loads(reward.read_text()) if reward.exists() else {}
        return {**numbers, "code": done.returncode, "output": done.stdout + done.stderr}

    return run


def shares(result: Mapping[str, Any]) -> tuple[float, float, float]:
    assert result["code"] == 0, result["output"]
    return result["reward"], result["fail_to_pass"], result["pass_to_pass"]


def test_swebench_is_judged_as_swebench_does(swe: ModuleType, judge: Judge, repository: Repository) -> None:
    problem = swe.READERS["swebench"](swebench_row(repository), 0)
    assert problem.image == "swebench/sweb.eval.x86_64.me_1776_ops-1:latest"
    assert list(problem.before)[-1] == "python -m pip --version"
    assert not any("git" in line.split()[0] and "config" not in line for line in problem.before)
    assert shares(judge(problem)) == (0.0, 0.0, 1.0)
    repository.write({"ops.py": HALF})
    assert shares(judge(problem)) == (0.0, 0.5, 1.0)
    repository.write({"ops.py": RIGHT})
    assert shares(judge(problem)) == (1.0, 1.0, 1.0)
    repository.write({"ops.py": RIGHT.replace("a * b", "a ** b")})
    assert shares(judge(problem)) == (0.0, 1.0, 0.0)


@pytest.mark.slow
def test_swegym(swe: ModuleType, judge: Judge, repository: Repository) -> None:
    problem = swe.READERS["swegym"](swegym_row(repository), 0)
    assert problem.image == "xingyaoww/sweb.eval.x86_64.facebookresearch_s_hydra-1:latest"
    assert problem.test == "pytest -rA --tb=long tests/test_more.py tests/test_ops.py"
    assert shares(judge(problem)) == (0.0, 0.0, 1.0)
    repository.write({"ops.py": RIGHT})
    assert shares(judge(problem)) == (1.0, 1.0, 1.0)


@pytest.mark.slow
def test_r2e_gym_wants_every_status_as_it_is_expected(swe: ModuleType, judge: Judge, repository: Repository) -> None:
    problem = swe.READERS["r2e_gym"](r2e_row(repository), 0)
    assert (problem.fail_to_pass, problem.pass_to_pass, problem.statement) == (
        ["test_add"],
        ["test_mul"],
        "add subtracts.",
    )
    python = repository.folder / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    repository.write({"ops.py": RIGHT})
    git(repository.folder, "commit", "-qam", "the solution")
    solution = git(repository.folder, "rev-parse", "HEAD").strip()
    git(repository.folder, "reset", "-q", "--hard", repository.base)
    setup = problem.setup.partition("\n")[2]  # its first line removes files of an image
    subprocess.run(["bash", "-euc", setup], cwd=repository.folder, check=True)
    assert git(repository.folder, "rev-parse", "HEAD").strip() == repository.base
    with pytest.raises(subprocess.CalledProcessError):
        git(repository.folder, "cat-file", "-e", solution)
    repository.write({"r2e_tests/test_1.py": "def test_mul(): pass\ndef test_add(): pass\n"})
    assert shares(judge(problem)) == (0.0, 0.0, 1.0)
    repository.write({"ops.py": HALF})
    assert shares(judge(problem)) == (1.0, 1.0, 1.0)


def test_swesmith_makes_a_commit_with_the_bug_and_without_its_tests(
    swe: ModuleType, judge: Judge, repository: Repository, tmp_path: Path
) -> None:
    problem = swe.READERS["swesmith"](smith_row(repository), 0)
    assert problem.image == "jyangballin/swesmith.x86_64.me_1776_ops.12345678:latest"
    hidden = {path: (repository.folder / path).read_text() for path in problem.hide}
    (tmp_path / "bug.patch").write_text(problem.setup_files["bug.patch"])
    setup = problem.setup.replace("/swe-setup", str(tmp_path)).replace("/tmp/tracked", str(tmp_path / "tracked"))
    subprocess.run(["bash", "-euc", setup], cwd=repository.folder, check=True)
    assert git(repository.folder, "status", "--short") == ""
    assert len(git(repository.folder, "log", "--oneline").splitlines()) == 1
    assert not (repository.folder / "tests/test_add.py").exists()
    head = git(repository.folder, "rev-parse", "HEAD").strip()
    restore = [{**entry, "commit": head} for entry in problem.restore]
    problem = swe.Problem(**{**vars(problem), "hidden": hidden, "base_commit": head, "restore": restore})
    assert shares(judge(problem)) == (0.0, 0.0, 1.0)
    repository.write({"tests/test_ops.py": "def test_mul(): assert False\n"})
    repository.write({"ops.py": RIGHT})
    assert shares(judge(problem)) == (1.0, 1.0, 1.0)


@pytest.mark.slow
def test_nemotron_s_own_rows_and_those_of_other_sets(swe: ModuleType, judge: Judge, repository: Repository) -> None:
    read = swe.READERS["nemotron"]
    wrapped = {"dataset_name": "SWE-Gym/SWE-Gym", "instance_dict": json.dumps(swegym_row(repository))}
    problem = read({"responses_create_params": {"input": [], "metadata": wrapped}}, 0)
    assert problem == swe.READERS["swegym"](swegym_row(repository), 0)
    flat = {**swebench_row(repository), "responses_create_params": {"input": []}, "subset": "verified"}
    assert read(flat, 0).name == "me__ops-1"
    problem = read(internal_row(repository), 0)
    assert (problem.image, problem.workdir) == ("nv/task:nv__ops-1", "/app")
    assert problem.env == {"SHOUT": "1", "KEY": "value"}
    assert shares(judge(problem)) == (0.0, 0.0, 1.0)
    repository.write({"ops.py": HALF})
    result = judge(problem)
    assert shares(result) == (1.0, 1.0, 1.0)
    assert "KEY is value" in result["output"]


def test_what_the_model_did_to_tests_does_not_matter(swe: ModuleType, judge: Judge, repository: Repository) -> None:
    problem = swe.READERS["swebench"](swebench_row(repository), 0)
    repository.write({"ops.py": RIGHT, "tests/test_ops.py": "import nothing\n", "tests/test_more.py": "assert False\n"})
    assert shares(judge(problem)) == (1.0, 1.0, 1.0)
    repository.write({"ops.py": WRONG, "tests/test_ops.py": "def test_add(): pass\ndef test_mul(): pass\n"})
    git(repository.folder, "commit", "-qam", "all is well")
    assert shares(judge(problem)) == (0.0, 0.0, 1.0)
    shutil.rmtree(repository.folder / "tests")
    (repository.folder / "elsewhere").mkdir()
    (repository.folder / "tests").symlink_to("elsewhere")
    assert shares(judge(problem)) == (0.0, 0.0, 1.0)
    assert not list((repository.folder / "elsewhere").iterdir())


FORGED_REPORT = """
import pytest

@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    result = yield
    result.get_result().outcome = "passed"
"""
SAY_PASSED = "".join(f"print('PASSED {case}')\n" for case in [*FAIL, *PASS])


@pytest.mark.slow
@pytest.mark.parametrize(
    "files",
    [
        {"conftest.py": FORGED_REPORT},
        {"tests/conftest.py": FORGED_REPORT},
        {"pytest.ini": "[pytest]\npythonpath = .\naddopts = -p forged\n", "forged.py": FORGED_REPORT},
        {"sitecustomize.py": SAY_PASSED + "import os\nos._exit(0)\n"},
        {"pytest.py": SAY_PASSED},
        {"ops.py": WRONG + SAY_PASSED},
        {"ops.py": SAY_PASSED + "import os\nos._exit(1)\n"},
    ],
    ids=["conftest", "tests-conftest", "ini", "sitecustomize", "pytest", "printed", "printed-and-failed"],
)
def test_hostile_files_get_nothing(
    swe: ModuleType, judge: Judge, repository: Repository, files: dict[str, str]
) -> None:
    problem = swe.READERS["swebench"](swebench_row(repository), 0)
    repository.write(files)
    result = judge(problem)
    assert shares(result)[:2] == (0.0, 0.0), result["output"]


@pytest.mark.slow
def test_a_program_that_the_tests_leave_writes_no_reward(
    swe: ModuleType, judge: Judge, repository: Repository, tmp_path: Path
) -> None:
    problem = swe.READERS["swebench"](swebench_row(repository), 0)
    write = f"import time, pathlib; time.sleep(6); pathlib.Path({str(tmp_path / 'reward.json')!r}).write_text('1')"
    leave = f"import subprocess, sys\nsubprocess.Popen([sys.executable, '-c', {write!r}], start_new_session=True)\n"
    repository.write({"ops.py": WRONG + leave})
    assert shares(judge(problem)) == (0.0, 0.0, 1.0)
    running = subprocess.run(["pgrep", "-f", "time.sleep(6); pathlib"], capture_output=True, text=True, check=False)
    assert running.stdout == ""


def test_programs_that_cannot_be_ended_are_a_failure(
    swe: ModuleType, repository: Repository, judge: Judge, monkeypatch: pytest.MonkeyPatch
) -> None:
    files_of = swe.verifier_files

    def end_nothing(problem: Any, seconds: float) -> dict[str, bytes]:
        files = files_of(problem, seconds)
        script = files["verify.py"]
        for text, other in ((b"END_SECONDS = 20.0", b"END_SECONDS = 0.1"), (b"(each, signal.SIGKILL)", b"(each, 0)")):
            assert script.count(text) == 1
            script = script.replace(text, other)
        return {**files, "verify.py": script}

    monkeypatch.setattr(swe, "verifier_files", end_nothing)
    problem = swe.READERS["swebench"](swebench_row(repository), 0)
    repository.write({"ops.py": RIGHT})
    assert shares(judge(problem)) == (1.0, 1.0, 1.0)
    leave = "import subprocess\nsubprocess.Popen(['sleep', '10'], start_new_session=True)\n"
    repository.write({"ops.py": RIGHT + leave})
    left = judge(problem)
    assert left["code"] == 1
    assert "no reward: programs start others" in left["output"]
    assert "reward" not in left


@pytest.mark.slow
def test_what_cannot_be_prevented_is_what_tests_import(swe: ModuleType, judge: Judge, repository: Repository) -> None:
    """As in swebench: the model's code runs in the tests' own process, and can be their report. The recipe says so."""
    problem = swe.READERS["swebench"](swebench_row(repository), 0)
    report = "".join(f"PASSED {case}\n" for case in [*FAIL, *PASS])
    forge = f"for each in range(3, 30):\n    try:\n        os.write(each, {report.encode()!r})\n    except OSError:\n"
    repository.write({"ops.py": f"import os\n{forge}        pass\nos._exit(0)\n"})
    assert shares(judge(problem)) == (1.0, 1.0, 1.0)


@pytest.mark.slow
def test_a_changed_repository_is_the_model_s_fault_and_a_wrong_patch_is_not(
    swe: ModuleType, judge: Judge, repository: Repository
) -> None:
    row = swebench_row(repository)
    problem = swe.READERS["swebench"](row, 0)
    blob = git(repository.folder, "rev-parse", "HEAD:tests/test_ops.py").strip()
    other = git(repository.folder, "hash-object", "-w", "ops.py").strip()
    loose = repository.folder / ".git" / "objects"
    target = loose / blob[:2] / blob[2:]
    target.chmod(0o644)
    shutil.copy(loose / other[:2] / other[2:], target)
    result = judge(problem)
    assert shares(result) == (0.0, 0.0, 0.0)
    assert "has other content" in result["output"] or "cat-file" in result["output"]
    shutil.rmtree(repository.folder / ".git")
    assert shares(judge(problem)) == (0.0, 0.0, 0.0)


def test_a_patch_of_another_commit_is_not_judged(swe: ModuleType, judge: Judge, repository: Repository) -> None:
    row = swebench_row(repository)
    row["test_patch"] = (
        row["test_patch"]
        .replace(" from ops import mul", " from ops import mul, sub")
        .replace("-from ops import mul", "-from ops import mul, sub")
    )
    result = judge(swe.READERS["swebench"](row, 0))
    assert result["code"] == 78
    assert "the tests' patch does not fit" in result["output"]
    assert "reward" not in result


@pytest.mark.slow
async def test_in_the_sandbox_the_tests_run_as_the_workspace_s_user(swe: ModuleType, repository: Repository) -> None:
    runner = (
        "import sys; [sys.path.insert(0, each) for each in ('tests', '.')]\nfor file in ('test_ops', 'test_more'):\n"
    )
    runner += "    for name, test in vars(__import__(file)).items():\n        if name.startswith('test_'):\n"
    runner += "            try:\n                test()\n                print(f'PASSED tests/{file}.py::{name}')\n"
    runner += "            except AssertionError:\n                print(f'FAILED tests/{file}.py::{name}')\n"
    row = swebench_row(repository)
    old = "pytest -rA -p no:cacheprovider tests/test_ops.py tests/test_more.py"
    row["eval_script"] = row["eval_script"].replace(old, f"python3 -c {shlex.quote(runner)}")
    problem = swe.Problem(**{**vars(swe.READERS["swebench"](row, 0)), "workdir": "."})
    verification = swe.make_verification(problem, 30)
    shutil.rmtree(repository.folder / ".git" / "hooks")
    for empty in [path for path in (repository.folder / ".git").rglob("*") if path.is_dir() and not [*path.iterdir()]]:
        (empty / ".keep").touch()
    extra = {"workspace_files": pack(repository.folder)}
    forge = (
        "echo 'def test_add(): pass' > tests/test_ops.py; printf '[pytest]' > conftest.py; git config core.fsmonitor x"
    )
    tools = load_tools("bash_terminal", shared={"workers": 1, "warm_modules": ()})
    async with InProcessTools(tools) as shell:
        for number, (edit, reward, share) in enumerate(
            (
                (forge, 0.0, 0.0),
                (f"{forge}; sed -i 's/a - b/a + b/' ops.py", 0.0, 0.5),
                (f"cat > ops.py <<'E'\n{RIGHT}E", 1.0, 1.0),
            )
        ):
            await shell.call(str(number), f"<bash>{edit}</bash>", step=0, extra=extra)
            sent = {VERIFY_FIELD: verification.model_dump(mode="json")}
            verdict = await shell.call(str(number), "", step=1, extra=sent, is_last_step=True)
            assert verdict.reward == reward, verdict.observation
            assert f'"fail_to_pass": {share}' in verdict.observation, verdict.observation


@pytest.mark.slow
def test_django_s_runner_and_slow_tests(swe: ModuleType, judge: Judge, repository: Repository) -> None:
    row = swebench_row(repository)
    test = "python3 -m unittest -v test_unit"
    script = row["eval_script"].replace("pytest -rA -p no:cacheprovider tests/test_ops.py tests/test_more.py", test)
    unit = "import unittest, ops\nclass T(unittest.TestCase):\n    def test_add(self):\n"
    unit += "        self.assertEqual(ops.add(2, 3), 5)\n"
    names = [f"test_add (test_unit.T{'.test_add' if sys.version_info >= (3, 11) else ''})"]
    row |= {"eval_script": script, "log_parser": "parse_log_django", "FAIL_TO_PASS": json.dumps(names)}
    row |= {"PASS_TO_PASS": "[]", "test_patch": repository.patch({"test_unit.py": unit})}
    problem = swe.READERS["swebench"](row, 0)
    assert shares(judge(problem)) == (0.0, 0.0, 1.0)
    repository.write({"ops.py": RIGHT})
    assert shares(judge(problem)) == (1.0, 1.0, 1.0)
    # Bytecode that Python takes unchecked, in place of the hidden test.
    repository.write({"ops.py": WRONG, "planted.py": unit.replace("ops.add(2, 3), 5", "1, 1")})
    cache = repository.folder / "__pycache__" / Path(importlib.util.cache_from_source("test_unit.py")).name
    kind = py_compile.PycInvalidationMode.UNCHECKED_HASH
    py_compile.compile(str(repository.folder / "planted.py"), str(cache), invalidation_mode=kind)
    assert shares(judge(problem)) == (0.0, 0.0, 1.0)
    slow = swe.Problem(**{**vars(problem), "test": f"{test}; sleep 60"})
    spec = swe.verifier_files

    def hurried(each: Any, seconds: float) -> dict[str, bytes]:
        return dict(spec(each, 8.0))

    swe.verifier_files = hurried
    assert shares(judge(slow)) == (0.0, 0.0, 1.0)


@pytest.mark.slow
def test_it_needs_no_newer_python_than_3_8(swe: ModuleType, judge: Judge, repository: Repository) -> None:
    ast.parse((SCRIPTS / "swe_verifier.py").read_text(), feature_version=(3, 8))
    old = next(iter(sorted(Path.home().glob(".pyenv/versions/3.8.*/bin/python3.8"))), None) or shutil.which("python3.8")
    if old is None or subprocess.run([str(old), "--version"], check=False, capture_output=True).returncode:
        pytest.skip("no Python 3.8 here")
    repository.write({"ops.py": RIGHT})
    assert shares(judge(swe.READERS["swebench"](swebench_row(repository), 0), str(old))) == (1.0, 1.0, 1.0)


def test_a_row_that_is_wrong_is_named_with_its_column(swe: ModuleType, repository: Repository) -> None:
    good = swebench_row(repository)
    for change, words in (
        ({"base_commit": "main"}, "row 3: field 'base_commit' is 'main'"),
        ({"test_patch": "nonsense"}, "row 3: field 'test_patch' is no patch"),
        ({"FAIL_TO_PASS": "[1"}, "row 3: field 'FAIL_TO_PASS' is no JSON"),
        ({"FAIL_TO_PASS": []}, "row 3: field 'FAIL_TO_PASS' is empty"),
        ({"PASS_TO_PASS": None}, "row 3: field 'PASS_TO_PASS' is None"),
        ({"problem_statement": ""}, "row 3: field 'problem_statement' is empty"),
        ({"log_parser": "parse_log_jest"}, "row 3: logs of 'parse_log_jest' cannot be read"),
        ({"eval_script": "pytest\n"}, "row 3: field 'eval_script' has no marks"),
    ):
        with pytest.raises(swe.RowError, match=words.replace("[", r"\[")):
            swe.READERS["swebench"]({**good, **change}, 3)
    with pytest.raises(swe.RowError, match="field 'repo' is 'a/b'; known: python/mypy"):
        swe.READERS["swegym"]({**good, "repo": "a/b"}, 3)
    with pytest.raises(swe.RowError, match="field 'dataset_name' is 'other'"):
        swe.READERS["nemotron"]({"responses_create_params": {"metadata": {"dataset_name": "other"}}}, 3)
    with pytest.raises(swe.RowError, match="field 'execution_result_content' needs test_file_names"):
        swe.READERS["r2e_gym"]({**r2e_row(repository), "execution_result_content": "{}"}, 3)
    smith = smith_row(repository)
    with pytest.raises(swe.RowError, match=r"the bug is in a hidden test file, ops\.py"):
        swe.READERS["swesmith"]({**smith, "FAIL_TO_PASS": ["ops.py::test_add"]}, 3)


def test_a_row_with_nothing_to_solve_is_rejected_by_every_reader(swe: ModuleType, repository: Repository) -> None:
    r2e = r2e_row(repository)
    before = json.dumps({"test_mul": "PASSED", "test_add": "FAILED"})
    internal = internal_row(repository)
    metadata = internal["responses_create_params"]["metadata"]
    instance = json.dumps({**json.loads(metadata["instance_dict"]), "fail_to_pass": "[]"})
    cases = {
        "swebench": ({**swebench_row(repository), "FAIL_TO_PASS": "[]"}, "FAIL_TO_PASS"),
        "swegym": ({**swegym_row(repository), "FAIL_TO_PASS": []}, "FAIL_TO_PASS"),
        "r2e_gym": ({**r2e, "expected_output_json": before}, "expected_output_json"),
        "nemotron": (
            {"responses_create_params": {"metadata": {**metadata, "instance_dict": instance}}},
            "fail_to_pass",
        ),
        "swesmith": ({**smith_row(repository), "FAIL_TO_PASS": []}, "FAIL_TO_PASS"),
    }
    assert cases.keys() == {source.value for source in swe.READERS}
    for source, (row, name) in cases.items():
        with pytest.raises(swe.RowError, match=f"row 3: field '{name}' is .*: there is nothing to solve"):
            swe.READERS[source](row, 3)


def test_a_verifier_without_tests_gives_no_reward(swe: ModuleType, repository: Repository, judge: Judge) -> None:
    problem = swe.READERS["swebench"](swebench_row(repository), 0)
    assert judge(dataclasses.replace(problem, fail_to_pass=[]))["reward"] == 0.0
    nothing = dataclasses.replace(problem, test="true", fail_to_pass=[], pass_to_pass=[], expected={})
    assert judge(nothing)["reward"] == 0.0


def test_without_an_evaluation_script_the_package_says_how(
    swe: ModuleType, repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = {**swebench_row(repository), "eval_script": None, "image": None}
    monkeypatch.setitem(sys.modules, "swebench", None)
    with pytest.raises(ValueError, match=r"row 0 has no field 'eval_script'.*source scripts/env\.sh train swe"):
        swe.READERS["swebench"](row, 0)

    def parse_log_pytest_v2() -> None:
        pass

    names = ("swebench", "swebench.harness", "swebench.harness.constants", "swebench.harness.log_parsers")
    for name in (*names, "swebench.harness.test_spec", "swebench.harness.test_spec.python"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    specs = {"me/ops": {"1.0": {"test_cmd": "pytest -rA", "install": "python -m pip install -e ."}}}
    monkeypatch.setattr(sys.modules["swebench.harness.constants"], "MAP_REPO_VERSION_TO_SPECS", specs, raising=False)
    parsers = {"me/ops": parse_log_pytest_v2}
    monkeypatch.setattr(sys.modules["swebench.harness.log_parsers"], "MAP_REPO_TO_PARSER", parsers, raising=False)
    python = sys.modules["swebench.harness.test_spec.python"]
    monkeypatch.setattr(python, "get_test_directives", lambda source: ["tests/test_ops.py"], raising=False)
    problem = swe.READERS["swebench"](row, 0)
    assert (problem.parser, problem.test) == ("pytest_v2", "pytest -rA tests/test_ops.py")
    assert problem.before[-1] == "python -m pip install -e ."
    assert problem.image == "swebench/sweb.eval.x86_64.me_1776_ops-1:latest"


async def judged(settings: ContainerSettings, verification: Verification, command: str) -> Verdict:
    """What the verifier says after a command of the policy's."""
    async with Container(settings, SessionLimits(wall_seconds=60, disk_bytes=256 << 20)) as container:
        assert (await container.exec(command)).ok
        return await verify(container, verification)


@pytest.mark.slow
def test_images_are_built_and_checked_in_real_containers(
    swe: ModuleType, repository: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With podman: the bug is put into an image, and the verifier judges in it."""
    podman, name = real("podman"), "localhost/verl-tool-test/swe-base:latest"
    if subprocess.run(
        [podman, "run", "--rm", "--network", "none", REAL_IMAGE, "true"], check=False, capture_output=True
    ).returncode:
        # A machine that may not raise its limits.
        (tmp_path / "containers.conf").write_text(
            '[containers]\ndefault_ulimits = ["nofile=1024:1024", "nproc=1000:1000"]\n'
        )
        monkeypatch.setenv("CONTAINERS_CONF", str(tmp_path / "containers.conf"))
    row = smith_row(repository)
    (tmp_path / "Dockerfile").write_text(f"FROM {REAL_IMAGE}\nCOPY testbed /testbed\nCOPY pytest /usr/bin/pytest\n")
    # The image has no pytest: functions are called, and reported as `pytest --verbose` does.
    runner = "#!/usr/bin/env python3\nimport sys\nsys.path.insert(0, '/testbed')\nfor file in sys.argv[1:]:\n"
    runner += "    if file.endswith('.py'):\n        names = {}\n        exec(open(file).read(), names)\n"
    runner += "        for name in [each for each in names if each.startswith('test_')]:\n            try:\n"
    runner += "                names[name]()\n                print(file + '::' + name, 'PASSED')\n"
    runner += "            except AssertionError:\n                print(file + '::' + name, 'FAILED')\n"
    (tmp_path / "pytest").write_text(runner)
    (tmp_path / "pytest").chmod(0o755)
    built = f"localhost/verl-tool-test/swe-{os.getpid()}"
    try:
        subprocess.run([podman, "build", "--tag", name, str(tmp_path)], check=True, capture_output=True)
        row["image_name"] = name
        (tmp_path / "rows.jsonl").write_text(json.dumps(row))
        settings = {
            "held_out": True,
            "engine": podman,
            "built_image": built + ":{name}",
            "check": True,
            "seconds": 60.0,
        }
        swe.main(swe.Source.swesmith, str(tmp_path / "rows.jsonl"), tmp_path / "data", **settings)
        [made] = pd.read_parquet(tmp_path / "data" / "test.parquet").to_dict("records")
        image = made["extra_info"]["tools_kwargs"]["workspace_image"]
        assert image == f"{built}:me_s_ops.12345678.func_basic_s_0"
        look = "cd /testbed; git log --oneline | wc -l; ls tests; grep -n return ops.py | head -1; ls -d /swe-setup"
        done = subprocess.run(
            [podman, "run", "--rm", "--network", "none", image, "bash", "-c", look],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.stdout.split("\n")[:3] == ["1", "conftest.py", "test_ops.py"]
        assert "a - b" in done.stdout
        verification = verification_of(made["reward_model"], "a row")
        assert verification is not None
        reports = "".join(f"{test} PASSED\\n" for test in (*row["FAIL_TO_PASS"], *row["PASS_TO_PASS"]))
        fake = f"printf '#!/bin/sh\\nprintf \"{reports}\"\\n' > /usr/bin/pytest"
        for command, reward in (("true", 0.0), (fake, 0.0), (f"printf {shlex.quote(RIGHT)} > ops.py", 1.0)):
            settings_of = ContainerSettings(podman, image, writable=True, workdir="/testbed")
            verdict = asyncio.run(judged(settings_of, verification, command))
            assert verdict.reward == reward, (command, verdict.told)
        row["patch"] = repository.patch({"pytest.ini": ""})
        (tmp_path / "rows.jsonl").write_text(json.dumps(row))
        with pytest.raises(swe.RowError, match=r"row 0 \(me__ops.*nothing gets the reward 1\.0, 3 tests"):
            swe.main(swe.Source.swesmith, str(tmp_path / "rows.jsonl"), tmp_path / "data", **settings)
    finally:
        names = [name, f"{built}:me_s_ops.12345678.func_basic_s_0"]
        subprocess.run([podman, "rmi", "--force", *names], check=False, capture_output=True)


def test_rows(swe: ModuleType, repository: Repository, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = swebench_row(repository)
    rows = [{**good, "instance_id": f"me__ops-{i}"} for i in range(4)]
    rows[1]["problem_statement"] = "x" * 40_000
    rows[2]["base_commit"] = "main"
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(swe.RowError, match=r"row 1 \(me__ops-1\): the prompt is longer than --max_prompt_chars 32000"):
        swe.main(swe.Source.swebench, str(path), tmp_path / "data", held_out=True)
    settings = {"skip_unreadable": True, "held_out": True, "image": "registry:5000/{image}"}
    swe.main(swe.Source.swebench, str(path), tmp_path / "data", **settings)
    assert "2 of 4 rows are left out" in capsys.readouterr().out
    made = pd.read_parquet(tmp_path / "data" / "test.parquet").to_dict("records")
    assert [row["extra_info"]["instance_id"] for row in made] == ["me__ops-0", "me__ops-3"]
    row = made[0]
    assert row["extra_info"]["tools_kwargs"] == {
        "workspace_image": "registry:5000/swebench/sweb.eval.x86_64.me_1776_ops-1:latest"
    }
    assert (row["extra_info"]["workdir"], row["extra_info"]["base_commit"]) == ("/testbed", repository.base)
    assert "add subtracts." in row["prompt"][-1]["content"]
    verification = verification_of(row["reward_model"], "a row")
    assert verification is not None
    assert sorted(unpack(verification.files)) == ["spec.json", "test.sh", "verify.py"]
    assert verification.timeout_seconds == 1860
    # No hidden test is in what the model or the tool server gets.
    assert "test_sub" not in json.dumps([list(row["prompt"]), row["extra_info"]], default=str)
    path.write_text(json.dumps(r2e_row(repository)))
    with pytest.raises(ValueError, match="its image must have its hidden tests removed; name an --engine"):
        swe.main(swe.Source.r2e_gym, str(path), tmp_path / "data", held_out=True)
    with pytest.raises(ValueError, match="--check runs containers; name an --engine"):
        swe.main(swe.Source.swebench, str(path), tmp_path / "data", check=True)


def test_published_images_are_fetched_once(swe: ModuleType, tmp_path: Path) -> None:
    engine = sys.modules["swe_images"].Engine
    log, program = tmp_path / "log", tmp_path / "engine"
    program.write_text(f'#!/bin/sh\necho "$@" >> {log}\n[ "$1" = pull ] || grep -q "^pull --quiet $3" {log}\n')
    program.chmod(0o755)
    problem = swe.Problem("a", "r", "s", "i:1", "t", "pytest", [], [])
    for _ in range(2):
        assert engine(str(program), "b:{name}", pull=True).prepare(problem, "i:1") == (problem, "i:1")
    assert log.read_text().splitlines() == ["image inspect i:1", "pull --quiet i:1", "image inspect i:1"]
    engine(str(program), "b:{name}").prepare(problem, "i:1")
    assert len(log.read_text().splitlines()) == 3
