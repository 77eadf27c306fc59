"""Which replica runs which entry of a request.

`ToolServerApp` asks its `Router` for everything that concerns other replicas; without one, `LocalRouter` says that this
process is all there is. A request that bears the header ``x-verl-tool-forwarded: 1`` comes from a peer: the app never
shows it to the router, so that a request makes at most one hop.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from pydantic import BaseModel

from verl_tool.protocol import StepRequest, StepResult

FORWARDED_HEADER = "x-verl-tool-forwarded"
"""Request header: run this here, and answer for this replica only. Its value is ``1``."""
REPLICA_HEADER = "x-verl-tool-replica"
"""Response header: id of the replica that took the request (not always the one that ran it)."""

RunLocal = Callable[[Sequence[StepRequest]], Awaitable[list[StepResult]]]
"""Runs entries in this process, admission and deadline included. Never raises for a single entry."""


class ReplicaInfo(BaseModel):
    """One replica as ``GET /replicas`` tells it."""

    id: str
    url: str
    """Base URL of its own door, such as ``http://127.0.0.1:40123``."""
    node: str = ""
    started: float = 0.0
    """Unix time, seconds."""


class ReplicaList(BaseModel):
    """Answer of ``GET /replicas``. An empty list: there is nobody but whoever answers at this address."""

    epoch: int = 0
    """Grows whenever the list changes."""
    replicas: list[ReplicaInfo] = []
    sticky: bool = False
    """Whether owners are remembered beyond the present list (stateful tools). Then the rendezvous owner is only a good
    guess for an older trajectory; the replica that is asked forwards if the guess was wrong."""


class HealthReport(BaseModel):
    """Answer of ``GET /health``. HTTP 200 if `status` is ``healthy``, else 503."""

    status: str
    """``healthy``, ``starting``, ``stopping`` or ``unhealthy``."""
    message: str = ""
    """What is wrong, if something is."""
    replica: str = ""
    tools: list[str] = []
    running: int = 0
    """Entries being run."""
    queued: int = 0
    """Entries admitted and waiting for a place."""
    trajectories: int = 0
    """Live trajectories that are remembered."""
    replicas: list[HealthReport] = []
    """The peers' own reports, where a router gathers them."""


class Router(Protocol):
    """What the app asks about other replicas. Every method has its own deadline and never raises for a dead peer."""

    replica_id: str
    """This replica's id, for the response header and the reports."""

    async def step(self, requests: Sequence[StepRequest], run_local: RunLocal) -> list[StepResult]:
        """Answer `requests` in order: call `run_local` with those that are to run here, forward the others.

        Called only for requests that no peer forwarded. An entry that cannot be answered gets a `StepResult` with a
        fault.
        """
        ...

    async def replicas(self) -> ReplicaList:
        """All live replicas, this one included."""
        ...

    async def health(self, own: HealthReport) -> HealthReport:
        """`own`, completed by what is known of the peers."""
        ...

    async def metrics(self, own: bytes) -> bytes:
        """`own` (Prometheus text of this replica), merged with the peers'."""
        ...


class LocalRouter:
    """The router of a server that is one process."""

    def __init__(self, replica_id: str = "local") -> None:
        self.replica_id = replica_id

    async def step(self, requests: Sequence[StepRequest], run_local: RunLocal) -> list[StepResult]:
        return await run_local(requests)

    async def replicas(self) -> ReplicaList:
        return ReplicaList()

    async def health(self, own: HealthReport) -> HealthReport:
        return own

    async def metrics(self, own: bytes) -> bytes:
        return own
