"""A process that makes no progress."""

from __future__ import annotations

import subprocess
import sys
import textwrap

from verl_tool.trainer.watchdog import EXIT_CODE


def run(code: str) -> subprocess.CompletedProcess[str]:
    head = f"import sys; sys.path[:0] = {sys.path!r}\nfrom verl_tool.trainer.watchdog import Watchdog\nimport time\n"
    return subprocess.run(
        [sys.executable, "-c", head + textwrap.dedent(code)], capture_output=True, text=True, timeout=30
    )


def test_silence_ends_the_process_and_names_the_phase():
    ended = run("""
        def hang_in_update(): time.sleep(20)
        dog = Watchdog(0.5); dog.start(); dog.enter("update"); hang_in_update()
    """)
    assert ended.returncode == EXIT_CODE
    assert "'update'" in ended.stderr
    assert "hang_in_update" in ended.stderr


def test_progress_keeps_it_running():
    ended = run("""
        dog = Watchdog(0.8); dog.start()
        for _ in range(8): time.sleep(0.2); dog.enter("step")
        print("done")
    """)
    assert ended.stdout == "done\n"
    assert ended.returncode == 0
