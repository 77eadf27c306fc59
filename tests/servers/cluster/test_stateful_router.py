"""Where entries of trajectories with state go: to the replica that holds them, however replicas come, go and fail."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from verl_tool.protocol import FaultKind, ForkRequest, ForkResponse, StepRequest, StepResult
from verl_tool.servers.cluster.cluster_router import faulted
from verl_tool.servers.cluster.members import Member, Members
from verl_tool.servers.cluster.peers import PeerAwayError, Peers, PeerTimeoutError
from verl_tool.servers.cluster.stateful_router import StatefulRouter
from verl_tool.util.json_text import encode_json

IDS = [f"t{i}" for i in range(60)]


def member(name: str) -> Member:
    return Member(id=name, url=f"http://127.0.0.1:1/{name}")


class Cluster(Peers):
    """Replicas in one process, each with the trajectories that it holds; what is done to a dead one fails."""

    def __init__(self, *names: str) -> None:
        self.held: dict[str, set[str]] = {name: set() for name in names}
        self.dead: set[str] = set()
        self.silent: set[str] = set()
        self.questions = 0
        self.routers: dict[str, StatefulRouter] = {}
        for name in names:
            self.add(name)

    def add(self, name: str) -> None:
        self.held.setdefault(name, set())
        members = Members(member(name))
        self.routers[name] = StatefulRouter(members, self, lambda t: t in self.held[name], direct_open=True)
        self.list(*self.held)

    def list(self, *names: str) -> None:
        """Serve pushes a list."""
        for router in self.routers.values():
            router._members.renew([member(name).model_dump() for name in names])

    def kill(self, name: str) -> None:
        self.dead.add(name)
        self.held[name].clear()

    async def at(self, name: str, requests: Sequence[StepRequest]) -> list[StepResult]:
        """A client's request that reaches the replica `name`."""
        return await self.routers[name].step(requests, self.running(name))

    def running(self, name: str) -> Callable:
        async def run(requests: Sequence[StepRequest]) -> list[StepResult]:
            for request in requests:
                self.held[name].add(request.trajectory_id)
                if request.finish:
                    self.held[name].discard(request.trajectory_id)
            return [StepResult(request.trajectory_id, name) for request in requests]

        return run

    def _reach(self, peer: Member) -> None:
        if peer.id in self.dead:
            raise PeerAwayError("refused", dead=True)
        if peer.id in self.silent:
            raise PeerTimeoutError("no answer")

    async def step(self, peer: Member, requests: Sequence[StepRequest], *, begun: bool = False) -> list[StepResult]:
        self._reach(peer)
        unknown = [r for r in requests if begun and not r.finish and r.trajectory_id not in self.held[peer.id]]
        lost = {r.trajectory_id: faulted(r, FaultKind.STATE_LOST, "unknown", retryable=False) for r in unknown}
        ran = iter(await self.running(peer.id)([r for r in requests if r not in unknown]))
        return [lost[r.trajectory_id] if r in unknown else next(ran) for r in requests]

    async def fork(self, peer: Member, request: ForkRequest) -> ForkResponse:
        self._reach(peer)
        return await self.forking(peer.id)(request)

    def forking(self, name: str) -> Callable:
        async def fork(request: ForkRequest) -> ForkResponse:
            self.held[name].add(request.new_trajectory_id)
            return ForkResponse(trajectory_id=request.new_trajectory_id, replica=name)

        return fork

    async def ask(self, peer: Member, path: str, seconds: float, question: object = None) -> bytes:
        self.questions += 1
        self._reach(peer)
        assert isinstance(question, dict)
        return encode_json({"ids": [each for each in question.get("ids", ()) if each in self.held[peer.id]]})


def turn(step: int | None = None, **options: bool) -> list[StepRequest]:
    return [StepRequest(trajectory_id, "x", step, **options) for trajectory_id in IDS]


async def places(cluster: Cluster, asked: str, requests: Sequence[StepRequest]) -> dict[str, str]:
    """Which replica ran each; the kind of a fault in its place."""
    results = await cluster.at(asked, requests)
    return {result.trajectory_id: result.fault.kind if result.fault else result.observation for result in results}


async def test_one_that_began_anew_elsewhere_is_found_and_one_that_is_gone_is_lost():
    cluster = Cluster("a", "b", "c")
    first = await places(cluster, "a", turn())
    await places(cluster, "b", turn())  # it remembers where each is
    for name, held in cluster.held.items():
        moved = {each for each in held if name != "c"}
        held -= moved
        cluster.held["c"] |= moved
    assert set((await places(cluster, "b", turn())).values()) <= {"b", "c"}
    assert set((await places(cluster, "a", turn(3))).values()) == {"c"}
    for held in cluster.held.values():
        held.clear()
    elsewhere = {trajectory_id for trajectory_id, name in first.items() if name != "a"}
    now = await places(cluster, "a", turn(4))
    assert {now[trajectory_id] for trajectory_id in elsewhere} == {FaultKind.STATE_LOST}


async def test_trajectory_starts_at_one_replica_and_stays_there():
    cluster = Cluster("a", "b", "c")
    begun = await places(cluster, "a", turn())
    assert set(begun.values()) == {"a", "b", "c"}
    for asked in "cab":
        assert await places(cluster, asked, turn()) == begun
    # What was learnt is remembered.
    before = cluster.questions
    assert await places(cluster, "b", turn()) == begun
    assert cluster.questions == before


async def test_replicas_that_come_move_nothing():
    cluster = Cluster("a", "b")
    begun = await places(cluster, "a", turn())
    cluster.add("c")
    for asked in "cba":
        assert await places(cluster, asked, turn()) == begun
    fresh = [StepRequest(f"new{i}", "x") for i in range(60)]
    assert set((await places(cluster, "a", fresh)).values()) == {"a", "b", "c"}


@pytest.mark.parametrize("seen", [True, False], ids=["known from the list", "known from its word"])
async def test_one_that_is_taken_away_serves_its_own_and_gets_nothing_new(seen):
    cluster = Cluster("a", "b")
    begun = await places(cluster, "a", turn())
    if seen:
        cluster.list("a")
        asked = "a"
    else:
        cluster.routers.pop("b")
        cluster.add("c")
        cluster.routers["c"]._members = Members(member("c"))
        cluster.list("a", "c")
        cluster.routers["c"]._members.hear_of_leaving(member("b"))
        asked = "c"
    assert await places(cluster, asked, turn()) == begun
    fresh = [StepRequest(f"new{i}", "x") for i in range(60)]
    assert "b" not in (await places(cluster, asked, fresh)).values()


async def test_state_of_a_dead_replica_is_lost_at_every_replica():
    cluster = Cluster("a", "b", "c")
    begun = await places(cluster, "a", turn(0))
    cluster.kill("b")
    expected = {t: FaultKind.STATE_LOST if place == "b" else place for t, place in begun.items()}
    # By its step, by the word of the client, and by what the replica asked had seen of it.
    assert await places(cluster, "c", turn(1)) == expected
    assert await places(cluster, "c", turn(begun=True)) == expected
    assert await places(cluster, "a", turn()) == expected
    # To free it is no error, and its id is free then.
    assert FaultKind.STATE_LOST not in (await places(cluster, "a", turn(finish=True))).values()
    assert set((await places(cluster, "a", turn())).values()) == {"a", "c"}


async def test_new_trajectory_moves_to_another_replica_if_its_owner_is_dead():
    cluster = Cluster("a", "b")
    cluster.dead.add("b")
    assert set((await places(cluster, "a", turn(0))).values()) == {"a"}


async def test_a_replica_that_does_not_answer_is_not_taken_for_dead():
    cluster = Cluster("a", "b")
    begun = await places(cluster, "a", turn(0))
    cluster.silent.add("b")
    cluster.add("c")
    cluster.list("a", "b", "c")
    found = await places(cluster, "c", turn(1))
    assert {t: place for t, place in found.items() if place == "a"} == {t: p for t, p in begun.items() if p == "a"}
    assert {found[t] for t, place in begun.items() if place == "b"} == {FaultKind.UNREACHABLE}
    cluster.silent.clear()
    assert await places(cluster, "c", turn(1)) == begun


async def test_a_first_call_that_is_sent_again_is_not_run_elsewhere_while_one_that_may_have_run_it_is_silent():
    cluster = Cluster("a", "b", "c")
    begun = await places(cluster, "a", turn(0))
    cluster.silent.add("b")
    again = await places(cluster, "c", [replace(request, resent=True) for request in turn(0)])
    expected = {t: FaultKind.UNREACHABLE if place == "b" else place for t, place in begun.items()}
    assert again == expected
    new = [StepRequest(f"new{i}", "x", 0) for i in range(20)]
    assert set((await places(cluster, "c", new)).values()) <= {"a", "c"}, "what was never sent waits for nobody"
    cluster.silent.clear()
    assert await places(cluster, "c", [replace(request, resent=True) for request in turn(0)]) == begun
    cluster.silent.add("b")
    cluster.list("a", "c")
    cluster.kill("b")
    lost = await places(cluster, "a", [replace(StepRequest("z1", "x", 0), resent=True)])
    assert set(lost.values()) <= {"a", "c"}, "a dead one is no longer waited for"


async def test_a_fork_is_where_its_source_is():
    cluster = Cluster("a", "b", "c")
    begun = await places(cluster, "a", turn())

    async def fork(asked: str, source: str, new: str) -> ForkResponse:
        request = ForkRequest(trajectory_id=source, new_trajectory_id=new)
        return await cluster.routers[asked].fork(request, cluster.forking(asked))

    for number, source in enumerate(IDS):
        assert (await fork("abc"[number % 3], source, f"fork-{source}")).replica == begun[source]
    forks = [StepRequest(f"fork-{source}", "x", 0) for source in IDS]
    assert await places(cluster, "b", forks) == {f"fork-{source}": place for source, place in begun.items()}
    elsewhere = next(other for other in IDS if begun[other] != begun[IDS[0]])
    for source, new, kind in (
        (IDS[0], elsewhere, FaultKind.BAD_REQUEST),
        ("nobody", "new", FaultKind.STATE_LOST),
    ):
        fault = (await fork("a", source, new)).fault
        assert fault is not None
        assert fault.kind == kind
