"""Interface that decides which replica runs which entry of a request.

`ToolServerApp` uses its `Router` for everything that concerns other replicas. A request with the header
``x-verl-tool-forwarded: 1`` comes from a peer. The app never routes it again, so that a request makes at most one hop.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from verl_tool.protocol import ForkRequest, ForkResponse, HealthReport, ReplicaList, StepRequest, StepResult

FORWARDED_HEADER = "x-verl-tool-forwarded"
"""Request header with the value ``1``: run this here, and answer for this replica only."""
PEER_KEY_HEADER = "x-verl-tool-peer-key"
"""Request header by which the replicas of one server recognise each other."""
RunLocal = Callable[[Sequence[StepRequest]], Awaitable[list[StepResult]]]
"""Runs entries in this process, with admission and deadline. Never raises for a single entry."""
ForkLocal = Callable[[ForkRequest], Awaitable[ForkResponse]]
"""Forks a trajectory of this process, within the deadline."""


class Router:
    """Router of a server with a single replica, and base class of the others.

    Every method has its own deadline and never raises for a dead peer. `replica_id` is that of this replica, for the
    response header and the reports.
    """

    def __init__(self, replica_id: str = "local") -> None:
        self.replica_id = replica_id

    async def step(self, requests: Sequence[StepRequest], run_local: RunLocal) -> list[StepResult]:
        """Answer `requests` in order: call `run_local` for those of this replica, and forward the others.

        An entry that cannot be answered gets a `StepResult` with a fault.
        """
        return await run_local(requests)

    async def fork(self, request: ForkRequest, fork_local: ForkLocal) -> ForkResponse:
        """Fork a trajectory on its replica, to which later steps of the new one are routed too.

        A failure is the fault of the answer.
        """
        return await fork_local(request)

    async def replicas(self) -> ReplicaList:
        """List all live replicas, including this one, if clients may choose among them."""
        return ReplicaList()

    async def health(self, own: HealthReport) -> HealthReport:
        """Add the reports of the peers to `own`, that of this replica."""
        return own

    async def metrics(self, own: bytes) -> bytes:
        """Merge `own`, the Prometheus text of this replica, with those of the peers."""
        return own
