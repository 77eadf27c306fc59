"""Processes that are forked from a template."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from verl_tool.platforms.preload import ray_worker
from verl_tool.platforms.preload.processes import ADDRESS, RAY_JOB, Contexts, Process, ProcessContext
from verl_tool.platforms.preload.template import template

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="for Linux")]
PRELOADED = "colorsys"
"""A module that nothing here imports."""


def tell(file: str) -> None:
    """In a child: what it finds."""
    found = {
        "parent": os.getppid(),
        "preloaded": PRELOADED in sys.modules,
        "given": os.environ.get("GIVEN"),
        "at_import": os.environ.get("AT_IMPORT"),
    }
    Path(file).write_text(json.dumps(found))


def answer(connection) -> None:
    connection.send(connection.recv() + 1)


def end_with(code: int) -> None:
    sys.exit(code)


@pytest.fixture
def environment(monkeypatch):
    monkeypatch.delenv(ADDRESS, raising=False)
    with template({"AT_IMPORT": "1"}, (PRELOADED,)):
        yield


def test_a_process_begins_with_imports_done_and_the_environment_of_who_asked(environment, monkeypatch, tmp_path):
    monkeypatch.setenv("GIVEN", "now")
    child = Process(target=tell, args=(str(tmp_path / "told"),))
    child.start()
    child.join(20)
    found = json.loads((tmp_path / "told").read_text())
    assert found.pop("parent") != os.getpid()
    assert found == {"preloaded": True, "given": "now", "at_import": None}


def test_it_is_a_process_as_multiprocessing_knows_them(environment):
    context = Contexts().get_context("spawn")
    assert isinstance(context, ProcessContext)
    ours, its = context.Pipe()
    child = context.Process(target=answer, args=(its,))
    child.start()
    ours.send(1)
    assert ours.poll(20)
    assert ours.recv() == 2
    child.join(20)
    assert child.exitcode == 0
    failed = context.Process(target=end_with, args=(3,))
    failed.start()
    failed.join(20)
    assert failed.exitcode == 3
    slow = context.Process(target=time.sleep, args=(100,))
    slow.start()
    slow.kill()
    slow.join(20)
    assert slow.exitcode == -signal.SIGKILL


def test_where_the_template_is_gone_it_starts_anew(monkeypatch, tmp_path):
    monkeypatch.setenv(ADDRESS, str(tmp_path / "gone"))
    child = ProcessContext().Process(target=tell, args=(str(tmp_path / "told"),))
    child.start()
    child.join(30)
    assert json.loads((tmp_path / "told").read_text())["parent"] == os.getpid()


def test_without_a_template_contexts_are_python_s_own(monkeypatch):
    monkeypatch.delenv(ADDRESS, raising=False)
    assert Contexts().get_context("spawn").get_start_method() == "spawn"


WORKER = """
import json, os, sys
found = {"arguments": sys.argv[1:], "name": __name__, "preloaded": %r in sys.modules, "given": os.environ.get("GIVEN")}
with open(os.environ["TOLD"], "w") as file:
    json.dump(found, file)
"""


@pytest.fixture
def start_worker(tmp_path, monkeypatch):
    """Start a worker as a raylet does, with Ray's own script beside it; what the worker finds."""
    told = tmp_path / "told"
    monkeypatch.setenv("TOLD", str(told))
    monkeypatch.setenv("RAY_JOB_ID", RAY_JOB)
    (tmp_path / "worker.py").write_text(WORKER % PRELOADED)
    (tmp_path / "setup_worker.py").write_text("import os; open(os.environ['TOLD'], 'w').write('\"anew\"')")

    def start(**context: object) -> object:
        command = [sys.executable, ray_worker.__file__, str(tmp_path / "worker.py"), "--port=1", "--language=PYTHON"]
        context = {"env_vars": {"GIVEN": "${HOME}/x"}, "py_executable": sys.executable} | context
        subprocess.run([*command, f"--serialized-runtime-env-context={json.dumps(context)}"], check=True, timeout=30)
        deadline = time.monotonic() + 20
        while not (told.exists() and told.read_text()):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        return json.loads(told.read_text())

    return start


def test_a_ray_worker_is_forked(environment, start_worker):
    home = os.environ["HOME"]
    assert start_worker() == {"arguments": ["--port=1"], "name": "__main__", "preloaded": True, "given": f"{home}/x"}


@pytest.mark.parametrize("own", [{"py_executable": "/other/python"}, {"command_prefix": ["nice"]}])
def test_a_worker_with_an_environment_of_its_own_starts_as_ray_starts_it(environment, start_worker, own):
    assert start_worker(**own) == "anew"


def test_so_does_one_of_another_job(environment, start_worker, monkeypatch):
    monkeypatch.setenv("RAY_JOB_ID", "02000000")
    assert start_worker() == "anew"


def test_so_does_one_whose_template_is_gone(start_worker, monkeypatch, tmp_path):
    monkeypatch.setenv(ADDRESS, str(tmp_path / "gone"))
    assert start_worker() == "anew"


def test_the_template_ends_with_its_starter(tmp_path):
    script = f"""
import os
from test_template import tell
from verl_tool.platforms.preload.processes import Process
from verl_tool.platforms.preload.template import template
with template({{}}, ()):
    child = Process(target=tell, args=({str(tmp_path / "told")!r},))
    child.start()
    child.join(20)
    os.kill(os.getpid(), 9)
"""
    here = {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    done = subprocess.run([sys.executable, "-c", script], env=os.environ | here, timeout=30)
    assert done.returncode == -signal.SIGKILL
    pid = json.loads((tmp_path / "told").read_text())["parent"]
    deadline = time.monotonic() + 10
    while Path(f"/proc/{pid}/stat").exists() and Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z":
        assert time.monotonic() < deadline
        time.sleep(0.05)
