"""Brings every entry of a stateful trajectory to the replica that holds it, in one hop at most.

A trajectory stays where it began. A new one begins at its rendezvous owner among the replicas that take new ones, so
that all parties come to the same place without talking. A replica that does not know a trajectory asks the others
whether one of them does, and remembers the answer: replicas may have come or be leaving since the trajectory began. If
nobody knows it and it has begun, its state went with its replica, and the answer is the fault ``state_lost``.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from pydantic import BaseModel, ValidationError
from starlette.responses import Response

from verl_tool.http.messages import HttpError, JsonResponse
from verl_tool.http.web_app import Request
from verl_tool.protocol import Fault, FaultKind, ForkRequest, ForkResponse, StepRequest, StepResult
from verl_tool.servers.cluster.cluster_router import ClusterReports, at_owners, faulted, late
from verl_tool.servers.cluster.members import Member, Members
from verl_tool.servers.cluster.peers import PeerAwayError, PeerBrokenError, Peers, PeerTimeoutError
from verl_tool.servers.replica.asgi_app import AppHandler, ToolServerApp
from verl_tool.servers.replica.router import ForkLocal, RunLocal
from verl_tool.servers.replica.wire import decode_model
from verl_tool.util.rendezvous import owner as rendezvous_owner

logger = logging.getLogger(__name__)

MAX_PLACEMENTS = 3
"""A new trajectory whose owner turns out to be dead is given to another, so often at most."""
ASK_SECONDS = 2.0
"""Deadline for a peer to say what it knows."""
MAX_REMEMBERED = 200_000
"""Trajectories of other replicas whose place is remembered."""
KNOWN_PATH, LEAVING_PATH = "/-/known", "/-/leaving"
"""Where replicas ask each other which trajectories they know, and tell that they are being taken away."""

LOST, UNKNOWN = "lost", ""
"""In place of a replica's id: the trajectory's state is gone; it cannot be known now who holds it."""

_LOST = "the replica that held trajectory {!r} is gone and its state with it; start it again as a new one"
_UNKNOWN = "trajectory {!r} cannot be forked: no replica knows it; it has called no tool, or it has ended"
_IN_USE = "trajectory {!r}: the id is in use; give the new trajectory one that was never used"
_SILENT = "a replica that may have this trajectory does not answer at the moment; send it again"


class _Ids(BaseModel):
    ids: list[str]


class _Place(NamedTuple):
    """Where a trajectory belongs: a replica's id, `LOST` or `UNKNOWN`."""

    replica_id: str
    begun: bool
    """That replica knows it already."""


class StatefulRouter(ClusterReports):
    """The `Router` of one replica among several whose trajectories have state that only their holders have.

    `known`: whether this replica knows a trajectory: it holds it, or remembers how its state was lost.
    """

    def __init__(self, members: Members, peers: Peers, known: Callable[[str], bool], *, direct_open: bool) -> None:
        super().__init__(members, peers, direct_open=direct_open, sticky=True)
        self._known = known
        self._remembered: OrderedDict[str, str] = OrderedDict()
        self._told: set[str] = set()

    def routes(self) -> list[tuple[str, str, AppHandler]]:
        """What the other replicas ask of this one."""
        return [("POST", KNOWN_PATH, self._answer_known), ("POST", LEAVING_PATH, self._hear_of_leaving)]

    async def step(self, requests: Sequence[StepRequest], run_local: RunLocal) -> list[StepResult]:
        """Answer `requests` in order: what is ours runs here, the rest at its holders, all at the same time."""
        return await self._step(requests, run_local, MAX_PLACEMENTS)

    async def fork(self, request: ForkRequest, fork_local: ForkLocal) -> ForkResponse:
        """Fork a trajectory at its holder, which is the holder of the new one from then on."""
        source, new = request.trajectory_id, request.new_trajectory_id
        places, silent = await self._locate([source, new])
        if new in places and places[new] != places.get(source):
            # Where both are, the table knows whether this is the same fork once more.
            return _not_forked(request, FaultKind.BAD_REQUEST, _IN_USE.format(new[:80]))
        if source not in places:
            if silent:
                return _not_forked(request, FaultKind.UNREACHABLE, _SILENT, retryable=True)
            return _not_forked(request, FaultKind.STATE_LOST, _UNKNOWN.format(source[:80]))
        peer = self._members.find(places[source])
        if places[source] == self.replica_id or peer is None:
            return await fork_local(request)
        return await self._fork_at(peer, request)

    async def announce_leaving(self) -> None:
        """Tell the other replicas, each once, that this one is being taken away, for those that never saw it."""
        peers = [peer for peer in self._members.others() if peer.id not in self._told]
        info = self._members.info.model_dump()
        answers = await asyncio.gather(*(self._ask(peer, LEAVING_PATH, info) for peer in peers))
        self._told |= {peer.id for peer, answer in zip(peers, answers, strict=True) if answer is not None}

    async def _answer_known(self, app: ToolServerApp, request: Request) -> Response:
        _for_replicas_only(app, request)
        requested = decode_model(request.body, _Ids).ids
        return JsonResponse({"ids": [trajectory_id for trajectory_id in requested if self._known(trajectory_id)]})

    async def _hear_of_leaving(self, app: ToolServerApp, request: Request) -> Response:
        _for_replicas_only(app, request)
        self._members.hear_of_leaving(decode_model(request.body, Member))
        return JsonResponse({"ids": []})

    async def _fork_at(self, peer: Member, request: ForkRequest) -> ForkResponse:
        try:
            forked = await self._peers.fork(peer, request)
        except PeerTimeoutError as error:
            return _not_forked(request, FaultKind.TIMEOUT, str(error), retryable=True)
        except (PeerAwayError, PeerBrokenError) as error:
            logger.warning("%s", error)
            if await self._is_dead(peer, error):
                return _not_forked(request, FaultKind.STATE_LOST, _LOST.format(request.trajectory_id[:80]))
            return _not_forked(request, FaultKind.UNREACHABLE, str(error), retryable=True)
        if forked.fault is None:
            self._remember(request.new_trajectory_id, peer.id)
        return forked

    async def _step(self, requests: Sequence[StepRequest], run_local: RunLocal, placements: int) -> list[StepResult]:
        places = await self._places(requests)
        run = partial(self._at, run_local=run_local, placements=placements)
        return await at_owners(requests, [places[request.trajectory_id] for request in requests], run)

    async def _places(self, requests: Sequence[StepRequest]) -> dict[str, _Place]:
        """Where each trajectory is to go."""
        started = {
            r.trajectory_id
            for r in requests
            if not r.finish and (r.step or r.begun or r.trajectory_id in self._remembered)
        }
        found, silent = await self._locate(list(dict.fromkeys(r.trajectory_id for r in requests)))
        accepting_replicas = [member.id for member in self._members.accepting_replicas()]
        places: dict[str, _Place] = {}
        for request in requests:
            trajectory_id = request.trajectory_id
            if trajectory_id in found:
                places[trajectory_id] = _Place(found[trajectory_id], True)
            elif trajectory_id in started:
                places[trajectory_id] = _Place(UNKNOWN if silent else LOST, True)
            elif request.finish:
                # Whose state is gone is free again.
                places.setdefault(trajectory_id, _Place(UNKNOWN if silent else self.replica_id, True))
            elif silent and request.resent:
                # The one that is silent may have run it.
                places[trajectory_id] = _Place(UNKNOWN, True)
            else:
                places[trajectory_id] = _Place(rendezvous_owner(trajectory_id, accepting_replicas), False)
            if request.finish:
                self._remembered.pop(trajectory_id, None)
        return places

    async def _locate(self, trajectory_ids: Sequence[str]) -> tuple[dict[str, str], bool]:
        """The ids of the replicas that know these trajectories, where one does; whether a replica did not answer."""
        places = {each: self.replica_id for each in trajectory_ids if self._known(each)}
        for each in trajectory_ids:
            remembered = self._remembered.get(each, "")
            if each not in places and self._members.is_listed(remembered):
                places[each] = remembered
        unknown = [each for each in trajectory_ids if each not in places]
        peers = self._members.holders() if unknown else []
        answers = await asyncio.gather(*(self._ask(peer, KNOWN_PATH, {"ids": unknown}) for peer in peers))
        for peer, answer in zip(peers, answers, strict=True):
            for each in answer or ():
                places.setdefault(each, peer.id)
                self._remember(each, peer.id)
        return places, None in answers

    async def _ask(self, peer: Member, path: str, question: object) -> list[str] | None:
        """What `peer` answers; nothing if it is dead, None if it does not answer and may live."""
        try:
            return _Ids.model_validate_json(await self._peers.ask(peer, path, ASK_SECONDS, question)).ids
        except (PeerAwayError, PeerBrokenError, PeerTimeoutError, ValidationError) as error:
            if isinstance(error, PeerAwayError) and await self._is_dead(peer, error):
                return []
            logger.warning("replica %s did not say what it knows: %s", peer.id, error)
            self._members.avoid(peer.id)
            return None

    async def _is_dead(self, peer: Member, error: PeerAwayError | PeerBrokenError) -> bool:
        """Whether a replica that did not answer is gone: nobody listens there, or Serve has given it up too."""
        if isinstance(error, PeerBrokenError):
            return await self._ask(peer, KNOWN_PATH, {"ids": []}) is not None and self._members.find(peer.id) is None
        if error.dead or not self._members.is_listed(peer.id):
            self._members.forget(peer.id)
            return True
        return False

    def _remember(self, trajectory_id: str, replica_id: str) -> None:
        self._remembered[trajectory_id] = replica_id
        if len(self._remembered) > MAX_REMEMBERED:
            self._remembered.popitem(last=False)

    async def _at(
        self, place: _Place, requests: Sequence[StepRequest], *, run_local: RunLocal, placements: int
    ) -> list[StepResult]:
        if place.replica_id == self.replica_id:
            return await run_local(requests)
        if place.replica_id == LOST:
            return _state_lost(requests)
        peer = self._members.find(place.replica_id)
        if peer is None:
            return [faulted(r, FaultKind.UNREACHABLE, _SILENT, retryable=True) for r in requests]
        try:
            results = await self._peers.step(peer, requests, begun=place.begun)
        except PeerTimeoutError as error:
            return late(requests, error)
        except (PeerAwayError, PeerBrokenError) as error:
            logger.warning("%s", error)
            dead = await self._is_dead(peer, error)
            if not place.begun and isinstance(error, PeerAwayError) and placements > 1:
                # Nothing of it had run.
                self._members.avoid(peer.id)
                return await self._step(requests, run_local, placements - 1)
            return _state_lost(requests) if dead else _not_reached(requests, error)
        for number, (request, result) in enumerate(zip(requests, results, strict=True)):
            if result.fault is None and not request.finish:
                self._remember(request.trajectory_id, peer.id)
            elif _is_lost(result) and place.begun and placements > 1:
                results[number] = await self._moved(request, result, peer, run_local)
        return results

    async def _moved(self, request: StepRequest, result: StepResult, peer: Member, run_local: RunLocal) -> StepResult:
        """The answer of the replica that has this trajectory now, if `peer` had it earlier; else `result`."""
        if self._remembered.pop(request.trajectory_id, None) is None:
            return result
        found, _ = await self._locate([request.trajectory_id])
        place = found.get(request.trajectory_id, peer.id)
        if place == peer.id:
            return result
        [answer] = await self._at(_Place(place, True), [request], run_local=run_local, placements=1)
        return answer


def _for_replicas_only(app: ToolServerApp, request: Request) -> None:
    if not app.is_forwarded(request):
        raise HttpError(403, "forbidden", "this path is for the replicas of this server")


def _not_forked(request: ForkRequest, kind: FaultKind, message: str, *, retryable: bool = False) -> ForkResponse:
    fault = Fault(kind=kind, message=message, retryable=retryable)
    return ForkResponse(trajectory_id=request.new_trajectory_id, fault=fault)


def _is_lost(result: StepResult) -> bool:
    return result.fault is not None and result.fault.kind == FaultKind.STATE_LOST


def _state_lost(requests: Sequence[StepRequest]) -> list[StepResult]:
    return [
        StepResult(r.trajectory_id, done=True)
        if r.finish
        else faulted(r, FaultKind.STATE_LOST, _LOST.format(r.trajectory_id[:80]), retryable=False)
        for r in requests
    ]


def _not_reached(requests: Sequence[StepRequest], error: PeerAwayError | PeerBrokenError) -> list[StepResult]:
    """Faults for a replica that lives and could not be reached: a later try helps."""
    unsent = isinstance(error, PeerAwayError)
    return [faulted(r, FaultKind.UNREACHABLE, str(error), retryable=unsent or r.step is not None) for r in requests]
