"""The replicas of a deployment, as Ray Serve pushes their list to whoever routes requests to them.

A replica's own request router (`ReplicaListing`, by Serve's public interface for routers) routes nothing: it hands the
list on, with what each replica told of itself at its start (``record_replica_metadata``).
"""

from __future__ import annotations

import asyncio
import importlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from pydantic import Field
from ray import serve
from ray.serve.config import RequestRouterConfig
from ray.serve.request_router import FIFOMixin, PendingRequest, RequestRouter, RunningReplica

from verl_tool.protocol import ReplicaInfo

AVOID_SECONDS = 10.0
"""How long a replica that could not be reached is given nothing new: Serve takes it off its list within that time, or
after half a minute if its whole node is lost."""

_on_list: Callable[[list[Mapping[str, Any]]], object] | None = None
"""What the `Members` of this process do with a new list."""


class Member(ReplicaInfo):
    """A replica as the others know it."""

    key: str = Field(default="", repr=False)
    """By which it knows requests of other replicas. Ray's control plane alone carries it."""


class ReplicaListing(FIFOMixin, RequestRouter):
    """Serve's list of the running replicas, for `Members`."""

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Any."""
        return [candidate_replicas]

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Serve has a new list."""
        super().update_replicas(replicas)
        # Serve sends this class by value, so that its own globals are copies of the module's.
        members = importlib.import_module("verl_tool.servers.cluster.members")
        if members._on_list is not None:
            members._on_list([replica.replica_metadata for replica in replicas])


def replica_listing() -> RequestRouterConfig:
    """For a deployment whose replicas have `Members`."""
    options: dict[str, Any] = {"request_router_class": f"{ReplicaListing.__module__}.{ReplicaListing.__name__}"}
    return RequestRouterConfig(**options)


class Members:
    """What the replica `info` knows of all replicas of its deployment.

    `leaving_seconds`: Serve ends a replica that it has taken off the list within this time. `clock`: monotonic, in
    seconds.
    """

    def __init__(
        self, info: Member, leaving_seconds: float = 3600.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.info = info
        self._leaving_seconds = leaving_seconds
        self.listed = asyncio.Event()
        """Serve has this replica on its list: from then on it knows the others."""
        self.leaves = False
        """Serve has told this replica to go."""
        self._clock = clock
        self._running: dict[str, Member] = {}
        self._leaving: dict[str, tuple[Member, float]] = {}
        """Those that are being taken away, and when they will be gone."""
        self._avoided: dict[str, float] = {}
        self._dead: set[str] = set()
        self._handle: object = None

    def start(self) -> None:
        """Have Serve push its list, in a replica, to the running event loop."""
        global _on_list
        context, loop = serve.get_replica_context(), asyncio.get_running_loop()
        _on_list = lambda metadata: loop.call_soon_threadsafe(self.renew, metadata)  # noqa: E731
        # With its first options a handle begins to listen; it goes on for as long as somebody has it.
        handle = serve.get_deployment_handle(context.deployment, context.app_name)
        self._handle = handle.options(method_name="describe")

    @property
    def draining(self) -> bool:
        """This replica is being taken away: it is given nothing new."""
        return self.leaves or (self.listed.is_set() and self.info.id not in self._running)

    def accepting_replicas(self) -> list[Member]:
        """The replicas that can be given something new; this one alone if there is no other."""
        now = self._clock()
        self._avoided = {replica_id: until for replica_id, until in self._avoided.items() if until > now}
        unable = self._dead | self._avoided.keys() | ({self.info.id} if self.draining else set())
        able = [info for replica_id, info in self._running.items() if replica_id not in unable]
        return able or [self.info]

    def others(self) -> list[Member]:
        """All other replicas on Serve's list."""
        return [info for info in self._running.values() if info.id != self.info.id]

    def holders(self) -> list[Member]:
        """All others that may hold a trajectory: also those that are being taken away."""
        now = self._clock()
        self._leaving = {each: entry for each, entry in self._leaving.items() if entry[1] > now}
        leaving = [info for info, _ in self._leaving.values()]
        return [info for info in (*self.others(), *leaving) if info.id not in self._dead]

    def find(self, replica_id: str) -> Member | None:
        """The entry of a replica that runs or is being taken away."""
        if replica_id in self._dead:
            return None
        left, gone = self._leaving.get(replica_id, (None, 0.0))
        return self._running.get(replica_id) or (left if gone > self._clock() else None)

    def is_listed(self, replica_id: str) -> bool:
        """Whether it is on Serve's list, and not known to be dead."""
        return replica_id in self._running and replica_id not in self._dead

    def avoid(self, replica_id: str) -> None:
        """It could not be reached: give it nothing new for `AVOID_SECONDS`."""
        self._avoided[replica_id] = self._clock() + AVOID_SECONDS

    def forget(self, replica_id: str) -> None:
        """It is dead, whatever Serve's list says at the moment."""
        self._leaving.pop(replica_id, None)
        self._dead.add(replica_id)

    def hear_of_leaving(self, member: Member) -> None:
        """A replica that this one never saw on the list says that it is being taken away."""
        if member.id not in self._running:
            self._leaving.setdefault(member.id, (member, self._clock() + self._leaving_seconds))

    def renew(self, metadata: Iterable[Mapping[str, Any]]) -> None:
        """Take over what the running replicas told of themselves (`Member`)."""
        members: Sequence[Member] = [Member.model_validate(each) for each in metadata if each]
        running = {member.id: member for member in members}
        gone = self._clock() + self._leaving_seconds
        known = {each: (info, gone) for each, info in self._running.items()} | self._leaving
        here = running.keys() | self._dead | {self.info.id}
        self._leaving = {replica_id: entry for replica_id, entry in known.items() if replica_id not in here}
        self._dead &= running.keys()
        self._running = running
        if self.info.id in running:
            self.listed.set()
