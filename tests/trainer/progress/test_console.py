"""What reaches the console of a training, and what its log."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PROGRAM = """
import logging, os, subprocess, sys
from pathlib import Path
from verl_tool.trainer.progress.console import loud_console, quiet_console

print("before")
try:
    with quiet_console(Path(sys.argv[1])) as console:
        print("printed")
        print("warned", file=sys.stderr)
        os.write(1, b"from C\\n")
        subprocess.run(["echo", "a child"])
        logging.getLogger("a.library").warning("a library warns")
        logging.getLogger("verl_tool.trainer").warning("the tool server died")
        logging.getLogger("verl_tool.trainer").info("not a warning")
        console.print("step 1")
        if sys.argv[2] == "fail":
            raise KeyError("inside")
finally:
    print("after")
"""


def run(log: Path, how: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", PROGRAM, str(log), how], capture_output=True, text=True, timeout=60)


def test_only_the_console_s_own_lines_reach_it(tmp_path):
    log = tmp_path / "run" / "main_ppo.log"
    done = run(log, "end")
    assert done.returncode == 0
    assert done.stdout.splitlines() == ["before", "after"]
    assert done.stderr.splitlines() == ["warning: the tool server died", "step 1"]
    logged = log.read_text()
    assert all(words in logged for words in ("printed", "warned", "from C", "a child", "a library warns"))
    assert "step 1" not in logged


def test_an_error_is_told_on_the_console(tmp_path):
    done = run(tmp_path / "main_ppo.log", "fail")
    assert done.returncode == 1
    assert done.stdout.splitlines() == ["before", "after"]
    assert "KeyError: 'inside'" in done.stderr


def test_a_second_start_adds_to_the_log(tmp_path):
    log = tmp_path / "main_ppo.log"
    run(log, "end")
    run(log, "end")
    assert log.read_text().count("a child") == 2


FULL = """
import sys
from pathlib import Path
from verl_tool.trainer.progress.console import quiet_console

with quiet_console(Path("/dev/full")) as console:  # every write to it fails as on a full disk
    console.print("step 1")
    sys.stdout = open(1, "w", closefd=False)  # one that keeps what is printed
    print("printed")
    raise KeyError("inside")
"""


def test_a_full_disk_does_not_hide_the_error_that_it_led_to():
    done = subprocess.run([sys.executable, "-c", FULL], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "step 1" in done.stderr
    assert "KeyError: 'inside'" in done.stderr
    assert "OSError" not in done.stderr.partition("KeyError")[0]
