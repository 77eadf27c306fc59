"""What a replica prints and logs."""

from __future__ import annotations

import subprocess
import sys

LOGS = """
import logging, sys
from verl_tool.servers.execution.current_trajectory import running_for
from verl_tool.servers.replica.replica_log import log_to_stderr

log_to_stderr("WARNING")
tool = logging.getLogger("own.tool")
with running_for("t-1"):
    print("half", end=" ")
    print("a line")
    sys.stderr.write("two\\nlines\\n")
    tool.info("unheard")
    try:
        raise KeyError("boom")
    except KeyError:
        tool.exception("it crashed")
print("of nobody")
"""


def test_what_is_printed_and_logged_tells_its_trajectory():
    done = subprocess.run([sys.executable, "-c", LOGS], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == ""
    lines = [line[24:] if line[:2] == "20" else line for line in done.stderr.splitlines()]
    assert [line for line in lines if line.startswith("INFO")] == [
        "INFO stdout [trajectory t-1]: half a line",
        "INFO stderr [trajectory t-1]: two",
        "INFO stderr [trajectory t-1]: lines",
        "INFO stdout: of nobody",
    ]
    assert "ERROR own.tool [trajectory t-1]: it crashed" in lines
    assert "KeyError: 'boom'" in lines
    assert "unheard" not in done.stderr
