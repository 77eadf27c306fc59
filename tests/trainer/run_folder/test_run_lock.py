"""One training writes into a folder; a process that has ended holds nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

pytest.importorskip("filelock")

from verl_tool.trainer.run_folder import run_lock as module
from verl_tool.trainer.run_folder.run_lock import LOCK_FILE, RunInUseError, RunLostError, run_lock

pytestmark = pytest.mark.slow

HOLDER = """
import signal, sys, time
from pathlib import Path
from verl_tool.trainer.run_folder.run_lock import run_lock
with run_lock(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


def holder(folder: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen([sys.executable, "-c", HOLDER, str(folder)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def as_of(path: Path, host: str) -> None:
    """The lock as a process on another host would have written it."""
    lines = path.read_text().splitlines()
    path.write_text("".join(f"host={host}\n" if line.startswith("host=") else f"{line}\n" for line in lines))


def test_a_second_training_is_refused_and_a_killed_one_holds_nothing(tmp_path: Path) -> None:
    process = holder(tmp_path)
    try:
        with pytest.raises(RunInUseError, match=rf"in use by process {process.pid} on host .*RUN="), run_lock(tmp_path):
            pass
    finally:
        process.kill()
        process.wait()
    assert (tmp_path / LOCK_FILE).exists()
    with run_lock(tmp_path):
        pass
    assert not (tmp_path / LOCK_FILE).exists()


def test_another_host_holds_the_folder_while_its_heart_beats(tmp_path: Path) -> None:
    process = holder(tmp_path)
    process.kill()
    process.wait()
    path, notes = tmp_path / LOCK_FILE, []
    as_of(path, "elsewhere")
    done = threading.Event()

    def beat() -> None:
        while not done.wait(0.2):
            os.utime(path)

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        with pytest.raises(RunInUseError, match="on host elsewhere"), run_lock(tmp_path, notes.append):
            pass
    finally:
        done.set()
        thread.join()
    assert len(notes) == 1
    assert "waiting up to 90 s" in notes[0]


def test_a_host_without_heartbeat_loses_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = HOLDER.replace("run_lock(Path(sys.argv[1]))", "run_lock(Path(sys.argv[1]), lease_seconds=1.0)")
    process = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    process.kill()
    process.wait()
    as_of(tmp_path / LOCK_FILE, "elsewhere")
    monkeypatch.setattr(module, "_POLL_SECONDS", 0.1)
    with run_lock(tmp_path, lease_seconds=1.0):
        pass


def test_a_removed_lock_ends_the_training(tmp_path: Path) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    threading.Timer(0.3, (tmp_path / LOCK_FILE).unlink).start()
    try:
        with pytest.raises(RunLostError, match="somebody removed it"), run_lock(tmp_path, lease_seconds=0.6):
            threading.Event().wait(30)
    finally:
        signal.signal(signal.SIGTERM, before)


def test_an_interrupted_training_stays_interrupted(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), run_lock(tmp_path):
        raise KeyboardInterrupt
    assert not (tmp_path / LOCK_FILE).exists()
