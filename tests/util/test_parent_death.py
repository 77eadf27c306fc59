"""A child ends with its parent, even if that was killed."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import psutil
import pytest

PARENT = """
import signal, subprocess, sys, time
from verl_tool.util.parent_death import signalled_with_parent
child = [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(60)"]
process = subprocess.Popen(child, stdout=subprocess.PIPE, preexec_fn=signalled_with_parent(signal.SIGTERM))
process.stdout.readline()
print(process.pid, flush=True)
time.sleep(60)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a child")
def test_a_child_ends_with_a_parent_that_was_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        parent.send_signal(signal.SIGKILL)
        parent.wait(10)
    until = time.monotonic() + 10
    while child.is_running() and child.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < until
        time.sleep(0.05)
