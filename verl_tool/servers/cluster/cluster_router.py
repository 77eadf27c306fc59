"""Brings every entry of a request to the replica that it belongs to, in one hop at most.

`StatelessRouter`: any replica can run anything. An entry with a step goes to its rendezvous owner, which holds the
record of its earlier steps; a large batch without steps is spread the same way so that all sandboxes work on it;
anything else runs where it lands. If the owner is gone, the entry runs here: running it twice changes nothing.

Trajectories with state: `stateful_router`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Hashable, Sequence
from functools import partial
from typing import TypeVar

from pydantic import ValidationError

from verl_tool.protocol import (
    Fault,
    FaultKind,
    HealthReport,
    ReplicaInfo,
    ReplicaList,
    StepRequest,
    StepResult,
)
from verl_tool.servers.cluster.members import Member, Members
from verl_tool.servers.cluster.peers import PeerError, Peers, PeerTimeoutError
from verl_tool.servers.replica.merged_metrics import merge_expositions
from verl_tool.servers.replica.router import Router, RunLocal
from verl_tool.util.rendezvous import owner as rendezvous_owner

logger = logging.getLogger(__name__)

SPREAD_FROM = 16
"""A batch of at least so many stateless entries is spread over the replicas."""
REPORT_SECONDS = 2.0
"""Deadline for a peer's health or metrics."""

Owner = TypeVar("Owner", bound=Hashable)


class ClusterReports(Router):
    """A `Router` of several replicas: their reports.

    `direct_open`: whether clients may use the replicas' direct servers, so that ``GET /replicas`` tells them. `sticky`:
    see `ReplicaList`.
    """

    def __init__(self, members: Members, peers: Peers, *, direct_open: bool, sticky: bool) -> None:
        super().__init__(members.info.id)
        self._members = members
        self._peers = peers
        self._direct_open = direct_open
        self._sticky = sticky

    async def replicas(self) -> ReplicaList:
        """The replicas that a client may go to directly: those that take new trajectories."""
        accepting_replicas = [
            ReplicaInfo(**each.model_dump(exclude={"key"})) for each in self._members.accepting_replicas()
        ]
        return ReplicaList(replicas=accepting_replicas if self._direct_open else [], sticky=self._sticky)

    async def health(self, own: HealthReport) -> HealthReport:
        """`own` with the peers' reports; a peer that does not answer is ``unhealthy`` in it."""
        reports = await asyncio.gather(*map(self._peer_health, self._members.others()))
        return own.model_copy(update={"replicas": list(reports)})

    async def metrics(self, own: bytes) -> bytes:
        """The metrics of all replicas, each sample labelled with its replica."""
        peers = self._members.others()
        texts = await asyncio.gather(*map(self._peer_metrics, peers))
        expositions = {self.replica_id: own}
        expositions |= {peer.id: text for peer, text in zip(peers, texts, strict=True) if text is not None}
        return merge_expositions(expositions)

    async def _peer_health(self, peer: Member) -> HealthReport:
        try:
            return HealthReport.model_validate_json(await self._peers.ask(peer, "/health", REPORT_SECONDS))
        except (PeerError, ValidationError) as error:
            return HealthReport(status="unhealthy", message=str(error), replica=peer.id)

    async def _peer_metrics(self, peer: Member) -> bytes | None:
        try:
            return await self._peers.ask(peer, "/metrics", REPORT_SECONDS)
        except PeerError as error:
            logger.warning("metrics without replica %s: %s", peer.id, error)
            return None


class StatelessRouter(ClusterReports):
    """The `Router` of one replica among several whose tools are all stateless. A fork has no state to copy."""

    def __init__(self, members: Members, peers: Peers, *, direct_open: bool) -> None:
        super().__init__(members, peers, direct_open=direct_open, sticky=False)

    async def step(self, requests: Sequence[StepRequest], run_local: RunLocal) -> list[StepResult]:
        """Answer `requests` in order, those of other owners at the same time."""
        return await at_owners(requests, self._owners(requests), partial(self._at, run_local=run_local))

    def _owners(self, requests: Sequence[StepRequest]) -> list[str]:
        candidates = [info.id for info in self._members.accepting_replicas()]
        spread = len(requests) >= SPREAD_FROM
        return [
            rendezvous_owner(r.trajectory_id, candidates)
            if spread or r.finish or r.step is not None
            else self.replica_id
            for r in requests
        ]

    async def _at(self, owner: str, requests: Sequence[StepRequest], *, run_local: RunLocal) -> list[StepResult]:
        peer = self._members.find(owner)
        if owner == self.replica_id or peer is None:
            return await run_local(requests)
        try:
            return await self._peers.step(peer, requests)
        except PeerTimeoutError as error:
            return late(requests, error)
        except PeerError as error:
            logger.warning("%s", error)
            self._members.avoid(owner)
            return await run_local(requests)


async def at_owners(
    requests: Sequence[StepRequest],
    owners: Sequence[Owner],
    run: Callable[[Owner, Sequence[StepRequest]], Awaitable[list[StepResult]]],
) -> list[StepResult]:
    """The results of `requests` in their order; `run` is given each owner's part, all parts at the same time."""
    groups: dict[Owner, list[int]] = {}
    for index, owner in enumerate(owners):
        groups.setdefault(owner, []).append(index)
    if len(groups) == 1:
        return await run(owners[0], requests)
    parts = await asyncio.gather(*(run(owner, [requests[i] for i in group]) for owner, group in groups.items()))
    results: dict[int, StepResult] = {}
    for indexes, part in zip(groups.values(), parts, strict=True):
        results.update(zip(indexes, part, strict=True))
    return [results[i] for i in range(len(requests))]


def late(requests: Sequence[StepRequest], error: PeerTimeoutError) -> list[StepResult]:
    """Faults for a peer that did not answer in time: what it may have run is safe to be sent again with a step only."""
    return [faulted(r, FaultKind.TIMEOUT, str(error), retryable=r.step is not None) for r in requests]


def faulted(request: StepRequest, kind: FaultKind, message: str, *, retryable: bool) -> StepResult:
    """The result of an entry that no replica could be made to answer."""
    return StepResult(request.trajectory_id, valid=False, fault=Fault(kind=kind, message=message, retryable=retryable))
