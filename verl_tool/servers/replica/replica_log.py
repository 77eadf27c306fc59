"""Write what a replica prints and logs to its standard error, each line with the trajectory that it belongs to.

On Ray, `serve.replica_output` forwards it to the launcher.
"""

from __future__ import annotations

import logging
import sys
import threading
from typing import Any, TextIO

from verl_tool.servers.execution.current_trajectory import trajectory_now

LINE = "%(asctime)s %(levelname)s %(name)s%(trajectory)s: %(message)s"


def log_to_stderr(level: str) -> None:
    """Redirect all loggers and all printed text to the standard error of this process."""
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
    """A stream whose lines are logged, whatever the log level. Other methods are those of the process's stream."""

    def __init__(self, name: str, handler: logging.Handler) -> None:
        self._name, self._handler = name, handler
        self._stream: TextIO = getattr(sys, f"__{name}__")
        self._partial = threading.local()

    def write(self, text: str) -> int:
        """Log the complete lines. The rest waits for the end of its line, separately for each thread."""
        *lines, rest = (getattr(self._partial, "text", "") + text).split("\n")
        self._partial.text = rest
        for line in lines:
            self._handler.handle(logging.LogRecord(self._name, logging.INFO, "", 0, line, None, None))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
