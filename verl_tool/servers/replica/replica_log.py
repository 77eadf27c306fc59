"""What a replica prints and logs: all of it goes to its standard error, each line with the trajectory that it is about.

On Ray it is carried to the launcher from there (`serve.replica_output`).
"""

from __future__ import annotations

import logging
import sys
import threading
from typing import Any, TextIO

from verl_tool.servers.execution.current_trajectory import trajectory_now

LINE = "%(asctime)s %(levelname)s %(name)s%(trajectory)s: %(message)s"


def log_to_stderr(level: str) -> None:
    """In a replica: from now on all loggers, and what is printed, go to the process's standard error."""
    handler = logging.StreamHandler(sys.__stderr__)
    handler.setFormatter(logging.Formatter(LINE))
    handler.addFilter(_with_trajectory)
    logging.basicConfig(level=level, handlers=[handler], force=True)
    for name in ("asyncio", "uvicorn"):
        logging.getLogger(name).setLevel(logging.WARNING)
    sys.stdout, sys.stderr = _Printed("stdout", handler), _Printed("stderr", handler)


def _with_trajectory(record: logging.LogRecord) -> bool:
    name = trajectory_now()
    record.trajectory = f" [trajectory {name}]" if name else ""
    return True


class _Printed:
    """A stream whose lines become records of the log, whatever its level. Its other methods are the process's own."""

    def __init__(self, name: str, handler: logging.Handler) -> None:
        self._name, self._handler = name, handler
        self._stream: TextIO = getattr(sys, f"__{name}__")
        self._begun = threading.local()

    def write(self, text: str) -> int:
        """A line that is not finished waits for its end."""
        *lines, rest = (getattr(self._begun, "text", "") + text).split("\n")
        self._begun.text = rest
        for line in lines:
            self._handler.handle(logging.LogRecord(self._name, logging.INFO, "", 0, line, None, None))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
