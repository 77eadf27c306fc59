"""The replicas of a deployment as Ray Serve lists them, for replicas that hold no state. Written for Ray 2.60.

Serve pushes the running replicas to whoever routes requests (its long poll), with what each told of itself at its start
(``record_replica_metadata``). Replicas whose tools are stateless need to know nothing else of one another.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from typing import Any

import ray
from ray import serve
from ray.serve._private.common import DeploymentTargetInfo
from ray.serve._private.constants import SERVE_CONTROLLER_NAME, SERVE_NAMESPACE
from ray.serve._private.long_poll import LongPollClient, LongPollNamespace

from verl_tool.protocol import ReplicaInfo

AVOID_SECONDS = 10.0
"""How long a replica that could not be reached is given nothing: Serve takes it off its list within that time, or after
half a minute if its whole node is lost."""


class ServeReplicas:
    """What the replica `info` knows of all replicas of its deployment. `clock`: monotonic, in seconds."""

    def __init__(self, info: ReplicaInfo, clock: Callable[[], float] = time.monotonic) -> None:
        self.info = info
        self._clock = clock
        self._listed: dict[str, ReplicaInfo] = {}
        self._avoided: dict[str, float] = {}
        self._poll: LongPollClient | None = None

    async def start(self) -> None:
        """Have Serve push its list, in a replica, to the running event loop."""
        key = (LongPollNamespace.DEPLOYMENT_TARGETS, serve.get_replica_context().replica_id.deployment_id)
        controller = ray.get_actor(SERVE_CONTROLLER_NAME, namespace=SERVE_NAMESPACE)
        listeners: dict[Any, Any] = {key: self._take}
        self._poll = LongPollClient(controller, listeners, asyncio.get_running_loop(), self.info.id)

    async def leave(self) -> None:
        """Take no further list."""
        if self._poll is not None:
            self._poll.stop()

    def takers(self) -> list[ReplicaInfo]:
        """The replicas that can be given something to run; this one alone if there is no other."""
        now = self._clock()
        self._avoided = {replica_id: until for replica_id, until in self._avoided.items() if until > now}
        return [info for replica_id, info in self._listed.items() if replica_id not in self._avoided] or [self.info]

    def peers(self) -> list[ReplicaInfo]:
        """All other replicas on Serve's list."""
        return [info for info in self._listed.values() if info.id != self.info.id]

    def find(self, replica_id: str) -> ReplicaInfo | None:
        """A listed replica's entry."""
        return self._listed.get(replica_id)

    def avoid(self, replica_id: str) -> None:
        """It could not be reached: give it nothing for `AVOID_SECONDS`."""
        self._avoided[replica_id] = self._clock() + AVOID_SECONDS

    def renew(self, metadata: Iterable[dict[str, Any]]) -> None:
        """Take over what the running replicas told of themselves (`ReplicaInfo`)."""
        infos = [ReplicaInfo.model_validate(told) for told in metadata if told]
        self._listed = {info.id: info for info in infos}

    def _take(self, targets: DeploymentTargetInfo) -> None:
        self.renew(replica.replica_metadata for replica in targets.running_replicas)
