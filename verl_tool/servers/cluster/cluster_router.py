"""Brings every entry of a request to the replica that it belongs to, in one hop at most.

Stateful tools: the registry says who owns a trajectory, once for each trajectory; it stays there for life. If its
owner is gone, the answer is the fault ``state_lost``.

Stateless tools: any replica can run anything, and the registry is never asked. An entry with a step goes to its
rendezvous owner, which holds the record of its earlier steps; a large batch without steps is spread the same way so
that all sandboxes work on it; anything else runs where it lands. If the owner is gone, the entry runs here: running it
twice changes nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from pydantic import ValidationError

from verl_tool.protocol import Fault, FaultKind, HealthReport, ReplicaInfo, ReplicaList, StepRequest, StepResult
from verl_tool.rendezvous import owner as rendezvous_owner
from verl_tool.servers.api.merged_metrics import merge_expositions
from verl_tool.servers.api.router import RunLocal
from verl_tool.servers.cluster.heartbeat import Heartbeat
from verl_tool.servers.cluster.peers import PeerAwayError, PeerBrokenError, Peers, PeerTimeoutError
from verl_tool.servers.cluster.placement import LOST, NOBODY, Owner
from verl_tool.servers.cluster.registry_client import RegistryUnreachableError

logger = logging.getLogger(__name__)

SPREAD_FROM = 16
"""A batch of at least so many stateless entries is spread over the replicas."""
MAX_PLACEMENTS = 3
"""A new trajectory whose owner turns out to be dead is given to another, so often at most."""
REPORT_SECONDS = 2.0
"""Deadline for a peer's health or metrics."""


class ClusterRouter:
    """The `Router` of one replica among several.

    `stateful`: whether a trajectory has state that only its owner has. `direct_open`: whether clients may use the
    replicas' direct servers, so that ``GET /replicas`` tells them.
    """

    def __init__(self, heartbeat: Heartbeat, peers: Peers, *, stateful: bool, direct_open: bool) -> None:
        self.replica_id = heartbeat.info.id
        self._heartbeat = heartbeat
        self._peers = peers
        self._stateful = stateful
        self._direct_open = direct_open

    async def step(self, requests: Sequence[StepRequest], run_local: RunLocal) -> list[StepResult]:
        """Answer `requests` in order: what is ours runs here, the rest at its owners, all at the same time."""
        return await self._step(requests, run_local, MAX_PLACEMENTS)

    async def _step(self, requests: Sequence[StepRequest], run_local: RunLocal, placements: int) -> list[StepResult]:
        owners = await self._owners(requests)
        if all(owner.replica_id == self.replica_id for owner in owners):
            return await run_local(requests)
        groups: dict[Owner, list[int]] = {}
        for index, owner in enumerate(owners):
            groups.setdefault(owner, []).append(index)
        parts = await asyncio.gather(
            *(self._at(owner, [requests[i] for i in group], run_local, placements) for owner, group in groups.items())
        )
        results: dict[int, StepResult] = {}
        for indexes, part in zip(groups.values(), parts, strict=True):
            results.update(zip(indexes, part, strict=True))
        return [results[i] for i in range(len(requests))]

    async def replicas(self) -> ReplicaList:
        """The replicas that a client may go to directly: those that take new trajectories first."""
        view = self._heartbeat.view
        if not self._direct_open:
            return ReplicaList(epoch=view.epoch, sticky=self._stateful)
        replicas = [info for info in view.replicas if info.id not in view.draining]
        return ReplicaList(epoch=view.epoch, replicas=replicas, sticky=self._stateful)

    async def health(self, own: HealthReport) -> HealthReport:
        """`own` with the peers' reports; a peer that does not answer is ``unhealthy`` in it."""
        peers = self._heartbeat.peers()
        reports = await asyncio.gather(*map(self._peer_health, peers))
        return own.model_copy(update={"replicas": list(reports)})

    async def metrics(self, own: bytes) -> bytes:
        """The metrics of all replicas, each sample labelled with its replica."""
        peers = self._heartbeat.peers()
        texts = await asyncio.gather(*map(self._peer_metrics, peers))
        expositions = {self.replica_id: own}
        expositions |= {peer.id: text for peer, text in zip(peers, texts, strict=True) if text is not None}
        return merge_expositions(expositions)

    async def _owners(self, requests: Sequence[StepRequest]) -> list[Owner]:
        """Where each entry is to go."""
        if self._stateful:
            return await self._stateful_owners(requests)
        candidates = self._heartbeat.assignable
        if candidates == [self.replica_id]:
            return [Owner(self.replica_id)] * len(requests)
        spread = len(requests) >= SPREAD_FROM
        return [
            Owner(rendezvous_owner(r.trajectory_id, candidates) if spread or r.step is not None else self.replica_id)
            for r in requests
        ]

    async def _stateful_owners(self, requests: Sequence[StepRequest]) -> list[Owner]:
        running = {r.trajectory_id: None for r in requests if not r.finish}
        finishing = {r.trajectory_id: None for r in requests if r.finish and r.trajectory_id not in running}
        try:
            owners = dict(zip(running, await self._heartbeat.owners(list(running)), strict=True))
            owners |= dict(zip(finishing, await self._finishing_owners(list(finishing)), strict=True))
        except RegistryUnreachableError as error:
            logger.warning("owners are not known now: %s", error)
            return [Owner(self._heartbeat.cached_owner(r.trajectory_id)) for r in requests]
        return [owners[r.trajectory_id] for r in requests]

    async def _finishing_owners(self, ids: Sequence[str]) -> list[Owner]:
        """Owners of trajectories to be freed. To free a lost or unknown one, it is forgotten, and nothing more."""
        if not ids:
            return []
        owners = await self._heartbeat.locate(ids)
        lost = [i for i, owner in zip(ids, owners, strict=True) if owner == LOST]
        if lost:
            await self._heartbeat.forget_lost(lost)
        return [Owner(self.replica_id if owner in (LOST, NOBODY) else owner) for owner in owners]

    async def _at(
        self, owner: Owner, requests: Sequence[StepRequest], run_local: RunLocal, placements: int
    ) -> list[StepResult]:
        if owner.replica_id == self.replica_id:
            return await run_local(requests)
        if owner.replica_id == LOST:
            return _state_lost(requests)
        peer = self._heartbeat.find(owner.replica_id)
        if peer is None:
            message = "it is not known at the moment which replica has this trajectory; send it again"
            return [_faulted(r, FaultKind.UNREACHABLE, message, retryable=True) for r in requests]
        try:
            return await self._peers.step(peer, requests)
        except PeerTimeoutError as error:
            return [_faulted(r, FaultKind.TIMEOUT, str(error), retryable=r.step is not None) for r in requests]
        except (PeerAwayError, PeerBrokenError) as error:
            logger.warning("%s", error)
            dead = await self._heartbeat.suspect(peer.id)
            if not self._stateful:
                return await run_local(requests)
            never_there = owner.fresh and isinstance(error, PeerAwayError)
            if dead and never_there and placements > 1:
                await self._heartbeat.forget_lost([r.trajectory_id for r in requests])
                return await self._step(requests, run_local, placements - 1)
            return _state_lost(requests) if dead else _not_reached(requests, error)

    async def _peer_health(self, peer: ReplicaInfo) -> HealthReport:
        try:
            return HealthReport.model_validate_json(await self._peers.get(peer, "/health", REPORT_SECONDS))
        except (PeerAwayError, PeerBrokenError, PeerTimeoutError, ValidationError) as error:
            return HealthReport(status="unhealthy", message=str(error), replica=peer.id)

    async def _peer_metrics(self, peer: ReplicaInfo) -> bytes | None:
        try:
            return await self._peers.get(peer, "/metrics", REPORT_SECONDS)
        except (PeerAwayError, PeerBrokenError, PeerTimeoutError) as error:
            logger.warning("metrics without replica %s: %s", peer.id, error)
            return None


def _state_lost(requests: Sequence[StepRequest]) -> list[StepResult]:
    message = "the replica that held trajectory {!r} is gone and its state with it; start it again as a new one"
    return [_faulted(r, FaultKind.STATE_LOST, message.format(r.trajectory_id[:80]), retryable=False) for r in requests]


def _not_reached(requests: Sequence[StepRequest], error: PeerAwayError | PeerBrokenError) -> list[StepResult]:
    """Faults for a replica that lives and could not be reached: a later try helps."""
    unsent = isinstance(error, PeerAwayError)
    return [_faulted(r, FaultKind.UNREACHABLE, str(error), retryable=unsent or r.step is not None) for r in requests]


def _faulted(request: StepRequest, kind: FaultKind, message: str, *, retryable: bool) -> StepResult:
    return StepResult(request.trajectory_id, valid=False, fault=Fault(kind=kind, message=message, retryable=retryable))
