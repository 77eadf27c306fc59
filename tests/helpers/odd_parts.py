"""Checks of a smoke test that misbehave in every way, run by the real machinery in their own processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

from verl_tool.doctor.gpu_smoke.part import Figures, PartContext, PartFailed, PartSkipped


def measure(context: PartContext) -> Figures:
    block = bytearray(200 << 20)
    time.sleep(2)
    return {"device": context.device, "bytes": len(block)}


def skip(context: PartContext) -> Figures:
    raise PartSkipped("nothing to see")


def fail(context: PartContext) -> Figures:
    raise PartFailed("2 is not 3")


def crash(context: PartContext) -> Figures:
    print("about to crash", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
    return {}


def hang_with_a_child(context: PartContext) -> Figures:
    """Hang. The child leaves the session and ignores SIGTERM."""
    ignoring = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
    subprocess.Popen([sys.executable, "-c", ignoring], start_new_session=True)
    (context.folder / "hangs").touch()
    time.sleep(600)
    return {}


def leave_a_child(context: PartContext) -> Figures:
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    return {}
