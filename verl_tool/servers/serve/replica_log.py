"""What the processes of a tool server print and log, brought to the terminal of whoever started it.

A replica writes all of it to its standard error, each line with the trajectory that it is about; Ray carries what its
workers write to the launcher, and `ReplicaOutput` prints what belongs to this server.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, TextIO
from unittest import mock

from ray._private import worker as ray_worker

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


class ReplicaOutput:
    """What of the output of a Ray cluster's workers belongs to the application `app_name`."""

    def __init__(self, app_name: str, *, local: bool) -> None:
        """`local`: the cluster is the server's own, so that what Ray and Serve say themselves is about it too."""
        self._replicas = f"ServeReplica:{app_name}:"
        self._local = local

    def printed(self) -> AbstractContextManager[Any]:
        """Within the block, ``ray.init`` has the output printed by this object from then on, in place of Ray's own way.

        That would print all lines of the launcher's job: on a shared cluster the replicas of all applications of the
        Serve that it started, and none of a Serve that somebody else did. And it leaves out lines that are alike but
        for their numbers, such as those about two trajectories.
        """
        ray_worker.global_worker._filter_logs_by_job = False
        return mock.patch.object(ray_worker, "print_to_stdstream", self._print)

    def lines(self, data: Mapping[str, Any]) -> Sequence[str]:
        """Those of one batch, as Ray's log monitor sends it, that are to be printed."""
        lines: Sequence[str] = data["lines"]
        actor = data.get("actor_name") or ""
        if actor.startswith(self._replicas):
            where = f", node {data['ip']}" if data.get("ip") != data.get("localhost") else ""
            return [f"(replica {data['pid']}{where}) {line}" for line in lines]
        if not self._local or not any(word in line for line in lines for word in ("WARNING", "ERROR", "Error")):
            return ()
        return [f"({actor or data['pid']}) {line}" for line in lines]

    def _print(self, data: Mapping[str, Any], ignore_prefix: bool) -> None:
        for line in self.lines(data):
            print(line, file=sys.stderr, flush=True)
