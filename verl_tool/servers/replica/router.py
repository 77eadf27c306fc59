"""Which replica runs which entry of a request.

`ToolServerApp` asks its `Router` for everything that concerns other replicas. A request that bears the header
``x-verl-tool-forwarded: 1`` comes from a peer: the app never shows it to the router, so that a request makes at most
one hop.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from verl_tool.protocol import ForkRequest, ForkResponse, HealthReport, ReplicaList, StepRequest, StepResult

FORWARDED_HEADER = "x-verl-tool-forwarded"
"""Request header: run this here, and answer for this replica only. Its value is ``1``."""
PEER_KEY_HEADER = "x-verl-tool-peer-key"
"""Request header by which replicas of one server know each other."""
RunLocal = Callable[[Sequence[StepRequest]], Awaitable[list[StepResult]]]
"""Runs entries in this process, admission and deadline included. Never raises for a single entry."""
ForkLocal = Callable[[ForkRequest], Awaitable[ForkResponse]]
"""Forks a trajectory of this process, deadline included."""


class Router:
    """What the app asks about other replicas; this one says that there are none.

    Every method has its own deadline and never raises for a dead peer. `replica_id`: this replica's, for the response
    header and the reports.
    """

    def __init__(self, replica_id: str = "local") -> None:
        self.replica_id = replica_id

    async def step(self, requests: Sequence[StepRequest], run_local: RunLocal) -> list[StepResult]:
        """Answer `requests` in order: call `run_local` with those that are to run here, forward the others.

        An entry that cannot be answered gets a `StepResult` with a fault.
        """
        return await run_local(requests)

    async def fork(self, request: ForkRequest, fork_local: ForkLocal) -> ForkResponse:
        """Fork a trajectory where it is, so that later steps of the new one are brought there too.

        What fails is the fault of the answer.
        """
        return await fork_local(request)

    async def replicas(self) -> ReplicaList:
        """All live replicas, this one included, if clients may choose among them."""
        return ReplicaList()

    async def health(self, own: HealthReport) -> HealthReport:
        """`own`, completed by what is known of the peers."""
        return own

    async def metrics(self, own: bytes) -> bytes:
        """`own` (Prometheus text of this replica), merged with the peers'."""
        return own
