"""The list of replicas that Serve pushes, and what a stateless router makes of it."""

from __future__ import annotations

from collections.abc import Sequence

from verl_tool.protocol import FaultKind, StepRequest, StepResult
from verl_tool.servers.cluster.cluster_router import SPREAD_FROM, StatelessRouter
from verl_tool.servers.cluster.members import AVOID_SECONDS, Member, Members
from verl_tool.servers.cluster.peers import PeerAwayError, Peers, PeerTimeoutError


def told(replica_id: str) -> dict[str, object]:
    return Member(id=replica_id, url=f"http://127.0.0.1:1/{replica_id}").model_dump()


LEAVING_SECONDS = 70.0


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def listed(*replica_ids: str, clock: Clock | None = None) -> Members:
    replicas = Members(Member.model_validate(told("a")), LEAVING_SECONDS, clock or Clock())
    replicas.renew(map(told, replica_ids))
    return replicas


def ids(infos: Sequence[Member]) -> list[str]:
    return [info.id for info in infos]


def test_a_replica_that_is_not_listed_yet_is_alone():
    alone = listed()
    assert (ids(alone.accepting_replicas()), alone.others()) == (["a"], [])


def test_a_new_list_takes_the_place_of_the_old_one():
    replicas = listed("a", "b", "c")
    assert (ids(replicas.accepting_replicas()), ids(replicas.others())) == (["a", "b", "c"], ["b", "c"])
    # Serve lists a replica of an application that is not ours, or of an older version, with nothing.
    replicas.renew([told("a"), {}, told("d")])
    assert ids(replicas.accepting_replicas()) == ["a", "d"]


def test_a_replica_that_left_the_list_may_hold_something_until_it_is_dead():
    replicas = listed("a", "b", "c")
    replicas.renew(map(told, "ac"))
    assert (ids(replicas.accepting_replicas()), ids(replicas.others())) == (["a", "c"], ["c"])
    assert ids(replicas.holders()) == ["c", "b"]
    replicas.forget("b")
    assert (ids(replicas.holders()), replicas.find("b")) == (["c"], None)
    # One that left before this one could see it says so itself.
    replicas.hear_of_leaving(Member.model_validate(told("d")))
    assert ids(replicas.holders()) == ["c", "d"]


def test_dead_replica_gets_no_requests_while_serve_lists_it():
    replicas = listed("a", "b")
    replicas.forget("b")
    assert (ids(replicas.accepting_replicas()), replicas.holders(), replicas.is_listed("b")) == (["a"], [], False)
    replicas.renew(map(told, "a"))
    assert replicas.holders() == []


def test_a_replica_that_is_taken_away_takes_nothing_new():
    replicas = listed("a", "b")
    replicas.renew(map(told, "b"))
    assert replicas.draining
    assert (ids(replicas.accepting_replicas()), ids(replicas.holders())) == (["b"], ["b"])


def test_a_replica_that_is_listed_again_takes_new_trajectories_unless_it_leaves():
    replicas = listed("a", "b")
    replicas.renew([])  # as while Serve's controller recovers
    assert replicas.draining
    replicas.renew(map(told, "ab"))
    assert (replicas.draining, ids(replicas.accepting_replicas())) == (False, ["a", "b"])
    replicas.leaves = True
    replicas.renew(map(told, "ab"))
    assert (replicas.draining, ids(replicas.accepting_replicas())) == (True, ["b"])


def test_one_that_left_holds_nothing_after_the_time_that_serve_grants_it():
    clock = Clock()
    replicas = listed("a", "b", clock=clock)
    replicas.renew(map(told, "a"))
    clock.now = 50.0
    replicas.hear_of_leaving(Member.model_validate(told("c")))
    replicas.renew(map(told, "a"))  # which does not begin the time anew
    assert (ids(replicas.holders()), replicas.find("b").id) == (["b", "c"], "b")
    clock.now = LEAVING_SECONDS + 0.1
    assert (ids(replicas.holders()), replicas.find("b"), replicas.find("c").id) == (["c"], None, "c")
    clock.now = 50.1 + LEAVING_SECONDS
    assert (replicas.holders(), replicas._leaving) == ([], {})


def test_a_replica_that_could_not_be_reached_is_given_nothing_for_a_while():
    clock = Clock()
    replicas = listed("a", "b", clock=clock)
    replicas.avoid("b")
    assert ids(replicas.accepting_replicas()) == ["a"]
    assert ids(replicas.others()) == ["b"]
    clock.now = AVOID_SECONDS + 0.1
    assert ids(replicas.accepting_replicas()) == ["a", "b"]


class Recorded(Peers):
    """In place of connections: notes who was sent what, and fails as it is told."""

    def __init__(self, error: Exception | None = None) -> None:
        self.sent: list[str] = []
        self._error = error

    async def step(self, peer: Member, requests: Sequence[StepRequest]) -> list[StepResult]:
        self.sent += [peer.id] * len(requests)
        if self._error is not None:
            raise self._error
        return [StepResult(request.trajectory_id, f"at {peer.id}") for request in requests]


async def here(requests: Sequence[StepRequest]) -> list[StepResult]:
    return [StepResult(request.trajectory_id, "here") for request in requests]


def batch(count: int, step: int | None = None) -> list[StepRequest]:
    return [StepRequest(f"trajectory-{i}", "x", step) for i in range(count)]


async def test_a_large_batch_is_spread_and_a_small_one_runs_where_it_lands():
    peers = Recorded()
    router = StatelessRouter(listed("a", "b", "c"), peers, direct_open=True)
    small = await router.step(batch(SPREAD_FROM - 1), here)
    assert {result.observation for result in small} == {"here"}
    large = await router.step(batch(300), here)
    assert [result.trajectory_id for result in large] == [request.trajectory_id for request in batch(300)]
    counts = [sum(r.observation == place for r in large) for place in ("here", "at b", "at c")]
    assert min(counts) > 50


async def test_an_entry_with_a_step_goes_where_its_earlier_steps_are_recorded():
    sent: list[list[str]] = []
    for step in range(3):
        peers = Recorded()
        await StatelessRouter(listed("a", "b", "c"), peers, direct_open=True).step(batch(9, step), here)
        sent.append(peers.sent)
    assert sent[0] == sent[1] == sent[2] != []


async def test_what_a_lost_replica_was_to_run_is_run_here_and_it_is_given_nothing_more():
    peers = Recorded(PeerAwayError("gone", dead=True))
    router = StatelessRouter(listed("a", "b"), peers, direct_open=True)
    for _ in range(2):
        assert {result.observation for result in await router.step(batch(50), here)} == {"here"}
    sent = len(peers.sent)
    assert 0 < sent < 50, "of the first batch only"
    assert [info.id for info in (await router.replicas()).replicas] == ["a"]


async def test_what_may_still_be_running_elsewhere_is_not_run_here_too():
    router = StatelessRouter(listed("b"), Recorded(PeerTimeoutError("late")), direct_open=True)
    with_step, without = [*await router.step(batch(1, 0), here), *(await router.step(batch(SPREAD_FROM), here))[:1]]
    assert [(r.fault.kind, r.fault.retryable) for r in (with_step, without)] == [
        (FaultKind.TIMEOUT, True),
        (FaultKind.TIMEOUT, False),
    ]


async def test_direct_servers_that_are_for_replicas_only_are_not_told():
    router = StatelessRouter(listed("a", "b"), Recorded(), direct_open=False)
    assert (await router.replicas()).replicas == []
