"""What the replicas of a server write (`replica_log`), brought by Ray to the terminal of whoever started it."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

from ray._private import worker as ray_worker


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
