"""Where the client sends a trajectory, as replicas come, go and fail."""

from __future__ import annotations

import pytest

from verl_tool.client.replica_map import REFRESH_SECONDS, ReplicaMap
from verl_tool.protocol import ReplicaInfo, ReplicaList
from verl_tool.util.rendezvous import owner

FRONT = "http://127.0.0.1:5000"


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def listing(*urls: str, sticky: bool = False) -> ReplicaList:
    return ReplicaList(replicas=[ReplicaInfo(id=f"r{i}", url=url) for i, url in enumerate(urls)], sticky=sticky)


def direct(i: int) -> str:
    return f"http://127.0.0.1:600{i}"


def test_without_a_list_everything_goes_to_the_server_s_port() -> None:
    replicas = ReplicaMap(FRONT)
    assert replicas.url_of("t") == FRONT
    replicas.renew(None)
    assert replicas.url_of("t") == FRONT
    replicas.renew(ReplicaList())
    assert replicas.url_of("t") == FRONT


def test_a_trajectory_goes_to_its_rendezvous_owner() -> None:
    replicas = ReplicaMap(FRONT)
    replicas.renew(listing(direct(0), direct(1), direct(2)))
    for i in range(100):
        assert replicas.url_of(f"t{i}") == direct(int(owner(f"t{i}", ["r0", "r1", "r2"])[1]))


def test_a_trajectory_stays_where_it_began_when_replicas_join() -> None:
    replicas = ReplicaMap(FRONT)
    replicas.renew(listing(direct(0), direct(1)))
    before = {f"t{i}": replicas.url_of(f"t{i}") for i in range(100)}
    replicas.renew(listing(direct(0), direct(1), direct(2), direct(3)))
    assert {tid: replicas.url_of(tid) for tid in before} == before
    assert {replicas.url_of(f"new{i}") for i in range(100)} == {direct(0), direct(1), direct(2), direct(3)}
    for tid in before:
        replicas.forget(tid)
    assert {tid: replicas.url_of(tid) for tid in before} != before


def test_trajectories_of_a_replica_that_left_the_list_go_elsewhere() -> None:
    replicas = ReplicaMap(FRONT)
    replicas.renew(listing(direct(0), direct(1)))
    ids = [f"t{i}" for i in range(50)]
    assert {replicas.url_of(tid) for tid in ids} == {direct(0), direct(1)}
    replicas.renew(listing(direct(0)))
    assert {replicas.url_of(tid) for tid in ids} == {direct(0)}


def test_stateful_trajectory_stays_pinned_and_counts_as_started() -> None:
    clock = Clock()
    replicas = ReplicaMap(FRONT, clock)
    replicas.renew(listing(direct(0), direct(1), sticky=True))
    ids = [f"t{i}" for i in range(50)]
    before = {tid: replicas.url_of(tid) for tid in ids}
    answered = ids[:25]
    for tid in answered:
        replicas.pin(tid, before[tid])
    # The second replica is being taken away: it serves what it has.
    replicas.renew(listing(direct(0), sticky=True))
    assert {tid: replicas.url_of(tid) for tid in answered} == {tid: before[tid] for tid in answered}
    assert {replicas.url_of(tid) for tid in ids[25:]} == {direct(0)}
    replicas.avoid(direct(1))
    assert {replicas.url_of(tid) for tid in ids} == {direct(0)}
    clock.now += 60
    assert {tid for tid in ids if replicas.has_started(tid)} == set(answered)
    replicas.distrust()
    assert {replicas.url_of(tid) for tid in ids} == {FRONT}
    assert {tid for tid in ids if replicas.has_started(tid)} == set(answered)
    replicas.mark_started("t30")
    assert replicas.has_started("t30")
    replicas.forget("t30")
    assert not replicas.has_started("t30")


def test_a_replica_that_failed_is_left_alone_for_a_while_and_a_new_list_is_due() -> None:
    clock = Clock()
    replicas = ReplicaMap(FRONT, clock)
    replicas.renew(listing(direct(0)))
    assert not replicas.is_stale()
    replicas.avoid(direct(0))
    assert replicas.is_stale()
    assert replicas.url_of("t") == FRONT
    replicas.renew(listing(direct(0)))
    assert replicas.url_of("t") == FRONT
    clock.now += 60
    assert replicas.url_of("t") == direct(0)


def test_the_list_grows_old() -> None:
    clock = Clock()
    replicas = ReplicaMap(FRONT, clock)
    assert replicas.is_stale()
    replicas.renew(None)
    assert not replicas.is_stale()
    clock.now += REFRESH_SECONDS
    assert replicas.is_stale()


@pytest.mark.parametrize(
    ("front", "side", "used"),
    [
        ("http://127.0.0.1:5000", "http://127.0.0.1:6000", True),
        ("http://localhost:5000", "http://127.0.0.1:6000", True),
        ("http://[::1]:5000", "http://127.0.0.1:6000", True),
        ("http://127.0.0.1:5000", "http://10.0.0.7:6000", True),
        ("http://tools.example:5000", "http://10.0.0.7:6000", True),
        ("http://tools.example:5000", "http://127.0.0.1:6000", False),
        ("http://10.0.0.7:5000", "http://localhost:6000", False),
    ],
)
def test_a_loopback_direct_server_is_used_only_from_the_same_machine(front: str, side: str, used: bool) -> None:
    replicas = ReplicaMap(front)
    replicas.renew(listing(side))
    assert replicas.url_of("t") == (side if used else front)
