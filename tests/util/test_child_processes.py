"""Processes that this one has started, at any depth."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from verl_tool.util.child_processes import HEAD, ChildProcesses


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline, "it did not come true in time"
        time.sleep(0.01)


@pytest.fixture
def head(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A shell with a child, and a process with the head's name."""
    program = tmp_path / HEAD
    shutil.copy(shutil.which("sleep") or "sleep", program)
    shell = subprocess.Popen(["sh", "-c", f"trap '' TERM; sleep 300 & echo $! >{tmp_path}/child; wait"])
    made = subprocess.Popen([program, "300"])
    until(lambda: (tmp_path / "child").exists() and bool((tmp_path / "child").read_text()))
    yield made
    for process in (shell, made):
        process.kill()
        process.wait()


def test_a_head_that_has_ended_is_seen(head: subprocess.Popen[bytes]) -> None:
    processes = ChildProcesses()
    assert not processes.has_lost_head()
    processes.refresh()
    assert not processes.has_lost_head()
    head.kill()
    until(processes.has_lost_head)
    head.wait()
    processes.refresh()
    assert processes.has_lost_head()


def test_nothing_of_them_is_left_whoever_their_parent_is(head: subprocess.Popen[bytes], tmp_path: Path) -> None:
    processes = ChildProcesses()
    processes.refresh()
    child = int((tmp_path / "child").read_text())
    parent = int(Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(parent, signal.SIGKILL)  # the child is another's now
    processes.refresh()
    processes.terminate(at_once=True)
    until(lambda: not Path(f"/proc/{child}").exists() or ") Z" in Path(f"/proc/{child}/stat").read_text())
    assert head.wait(10) == -signal.SIGKILL
