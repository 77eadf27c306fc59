"""A training that makes no progress."""

from __future__ import annotations

import subprocess
import sys
import textwrap

from verl_tool.trainer.monitoring.abort import EXIT_CODE

HEAD = f"""
import sys; sys.path[:0] = {sys.path!r}
from verl_tool.trainer.monitoring.abort import aborted_by_watchers
from verl_tool.trainer.monitoring.watchdog import StalledError, Watchdog
import time
"""


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", HEAD + textwrap.dedent(code)], capture_output=True, text=True, timeout=30
    )


def test_silence_ends_the_training_and_names_the_phase():
    ended = run("""
        def hang_in_update(): time.sleep(20)
        try:
            with aborted_by_watchers():
                dog = Watchdog(0.5); dog.start(); dog.enter("update"); hang_in_update()
        except StalledError as error:
            print("caught:", error)
    """)
    assert ended.returncode == 0
    assert "caught: no progress" in ended.stdout
    assert "'update'" in ended.stdout
    assert "hang_in_update" in ended.stderr


def test_without_a_training_it_ends_the_process():
    ended = run("""
        dog = Watchdog(0.5); dog.start(); dog.enter("update"); time.sleep(20)
    """)
    assert ended.returncode == EXIT_CODE
    assert "'update'" in ended.stderr


def test_progress_keeps_it_running():
    ended = run("""
        dog = Watchdog(0.8); dog.start()
        for _ in range(8): time.sleep(0.2); dog.enter("step")
        print("done")
    """)
    assert ended.stdout == "done\n"
    assert ended.returncode == 0
