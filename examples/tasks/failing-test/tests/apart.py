"""Runs code that is being checked so that it has no way to the reward: it sees what it is given, and prints answers.

The code has the user of the check. So the files of the check are removed before it starts, all that it leaves running
is ended before the reward is written, and other processes may not look into this one.
"""

import contextlib
import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

SECONDS = 20
REWARDS = Path("/logs/verifier")
_DUMPABLE = 4  # of prctl(2)
_PROGRAM = "import json, sys; sys.path.insert(0, '.'); given = json.load(sys.stdin); {}; print(json.dumps(result))"


def answers(code, given):
    """What `code` makes of `given` as the variable ``result``; None if it fails. Both are JSON."""
    libc = ctypes.CDLL(None)
    libc.prctl(_DUMPABLE, 0, 0, 0, 0)
    shutil.rmtree(os.path.dirname(os.path.realpath(__file__)))
    command = [sys.executable, "-I", "-c", _PROGRAM.format(code)]
    try:
        done = subprocess.run(command, input=json.dumps(given), capture_output=True, text=True, timeout=SECONDS)
        return json.loads(done.stdout.splitlines()[-1])
    except (subprocess.TimeoutExpired, ValueError, IndexError):
        return None
    finally:
        end_all_others()


def end_all_others():
    """Every process of the sandbox but its first one, and this one with those that wait for it.

    A sandbox may refuse to make a process the parent of orphans, so it does not matter whose children they are.
    """
    kept, pid = {1}, os.getpid()
    while pid > 1:
        kept.add(pid)
        pid = int(_status(pid)[1])
    while others := [pid for pid in _processes() if pid not in kept and _runs(pid)]:
        for pid in others:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _processes():
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _runs(pid):
    try:
        return _status(pid)[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def _status(pid):
    """State, parent and so on, which stand behind the name in parentheses (proc_pid_stat(5))."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def give(right):
    """Write the reward, and nothing beside it."""
    shutil.rmtree(REWARDS, ignore_errors=True)
    REWARDS.mkdir(parents=True)
    (REWARDS / "reward.txt").write_text("1\n" if right else "0\n")
