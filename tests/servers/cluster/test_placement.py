"""The directory's book-keeping: owners stay, the dead's trajectories are lost, memory is bounded."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from verl_tool.protocol import ReplicaInfo
from verl_tool.servers.cluster.placement import LOST, NOBODY, Ownership

TTL = 100.0


def info(replica_id: str) -> ReplicaInfo:
    return ReplicaInfo(id=replica_id, url=f"http://127.0.0.1:1/{replica_id}")


def with_replicas(*replica_ids: str, max_lost: int = 1000) -> Ownership:
    ownership = Ownership(TTL, max_lost=max_lost)
    for replica_id in replica_ids:
        ownership.join(info(replica_id), [], draining=False, now=0.0)
    return ownership


def owners(ownership: Ownership, ids: list[str], now: float = 0.0) -> list[str]:
    return [owner.replica_id for owner in ownership.claim(ids, assign=True, now=now)]


IDS = [f"trajectory-{i}" for i in range(400)]


def test_owners_are_spread_and_stay_when_replicas_join():
    ownership = with_replicas("a", "b", "c", "d")
    before = owners(ownership, IDS)
    assert {r: before.count(r) > 50 for r in "abcd"} == dict.fromkeys("abcd", True)
    ownership.join(info("e"), [], draining=False, now=0.0)
    assert owners(ownership, IDS) == before
    assert "e" in owners(ownership, [f"new-{i}" for i in range(100)])


def test_only_the_dead_ones_trajectories_are_lost():
    ownership = with_replicas("a", "b", "c")
    before = owners(ownership, IDS)
    assert ownership.leave("b", now=1.0) == before.count("b")
    assert owners(ownership, IDS) == [LOST if owner == "b" else owner for owner in before]


def test_a_lost_trajectory_is_free_again_after_its_time_or_when_given_up():
    ownership = with_replicas("a", "b")
    ownership.claim(["x", "y"], assign=True, now=0.0)
    ownership.leave("a", now=0.0)
    ownership.leave("b", now=0.0)
    ownership.join(info("c"), [], draining=False, now=1.0)
    ownership.forget_lost(["y"])
    assert owners(ownership, ["x", "y"], now=TTL - 1) == [LOST, "c"]
    assert owners(ownership, ["x", "y"], now=TTL + 1) == ["c", "c"]


def test_a_draining_replica_keeps_its_own_and_gets_nothing_new():
    ownership = with_replicas("a", "b")
    before = owners(ownership, IDS)
    ownership.drain("a")
    assert owners(ownership, IDS) == before
    assert set(owners(ownership, [f"new-{i}" for i in range(50)])) == {"b"}


def test_without_assigning_an_unknown_trajectory_has_nobody():
    ownership = with_replicas("a")
    assert [owner.replica_id for owner in ownership.claim(["x"], assign=False, now=0.0)] == [NOBODY]
    assert owners(Ownership(TTL), ["x"]) == [NOBODY]


def test_only_the_first_claim_is_fresh():
    ownership = with_replicas("a")
    assert [ownership.claim(["x"], assign=True, now=0.0)[0].fresh for _ in range(3)] == [True, False, False]


def test_what_a_replica_says_it_holds_is_its_own():
    """After a restart of the directory, or a false alarm."""
    ownership = with_replicas("a")
    ownership.claim(["x"], assign=True, now=0.0)
    ownership.leave("a", now=0.0)
    ownership.join(info("a"), ["x", "z"], draining=False, now=1.0)
    assert owners(ownership, ["x", "z"], now=1.0) == ["a", "a"]
    assert ownership.lost_count() == 0


def test_released_trajectories_are_free_and_expired_ones_lost():
    ownership = with_replicas("a", "b")
    first = owners(ownership, ["x", "y"])
    for trajectory_id, owner, finished in (("x", first[0], True), ("y", first[1], False)):
        ownership.release(owner, [trajectory_id] if finished else [], [] if finished else [trajectory_id], now=0.0)
    assert ownership.claim(["x"], assign=True, now=0.0)[0].fresh
    assert owners(ownership, ["y"]) == [LOST]


def test_a_release_by_another_than_the_owner_changes_nothing():
    ownership = with_replicas("a", "b")
    [owner] = owners(ownership, ["x"])
    ownership.release("b" if owner == "a" else "a", ["x"], [], now=0.0)
    assert owners(ownership, ["x"]) == [owner]


def test_what_never_came_to_be_is_forgotten_at_the_second_report():
    ownership = with_replicas("a")
    owners(ownership, ["held", "refused"])
    ownership.report("a", ["held"])
    assert ownership.owned("a") == 2, "the first entry may be on its way"
    ownership.report("a", ["held"])
    assert ownership.owned("a") == 1
    assert [o.fresh for o in ownership.claim(["held", "refused"], assign=True, now=0.0)] == [False, True]


def test_what_came_late_is_kept():
    ownership = with_replicas("a")
    owners(ownership, ["late"])
    for held in ([], ["late"], [], ["late"]):
        ownership.report("a", held)
    assert ownership.owned("a") == 1


def test_silence_is_measured_from_the_last_beat():
    ownership = with_replicas("a", "b")
    assert ownership.beat("a", now=5.0)
    assert [i.id for i in ownership.silent(3.0, now=6.0)] == ["b"]
    assert not ownership.beat("stranger", now=6.0)


def test_the_memory_of_the_lost_is_bounded():
    ownership = with_replicas("a", max_lost=10)
    ownership.claim(IDS, assign=True, now=0.0)
    ownership.leave("a", now=0.0)
    assert ownership.lost_count() == 10


def test_every_change_of_the_replicas_has_a_later_epoch():
    ownership = Ownership(TTL, first_epoch=7)
    epochs = [ownership.view().epoch]
    for change in (
        lambda: ownership.join(info("a"), [], draining=False, now=0.0),
        lambda: ownership.join(info("b"), [], draining=False, now=0.0),
        lambda: ownership.drain("a"),
        lambda: ownership.leave("a", now=0.0),
    ):
        change()
        epochs.append(ownership.view().epoch)
    assert epochs == sorted(set(epochs))


REPLICAS = st.sampled_from(["r0", "r1", "r2", "r3"])
TRAJECTORIES = st.lists(st.sampled_from([f"t{i}" for i in range(12)]), max_size=6)
CHANGES = st.lists(
    st.one_of(
        st.tuples(st.just("join"), REPLICAS, TRAJECTORIES),
        st.tuples(st.just("leave"), REPLICAS, st.just([])),
        st.tuples(st.just("drain"), REPLICAS, st.just([])),
        st.tuples(st.just("claim"), REPLICAS, TRAJECTORIES),
        st.tuples(st.just("finish"), REPLICAS, TRAJECTORIES),
        st.tuples(st.just("expire"), REPLICAS, TRAJECTORIES),
    ),
    max_size=40,
)


@settings(max_examples=200, deadline=None)
@given(CHANGES)
def test_whatever_happens_a_trajectory_has_one_owner_that_lives(changes):
    ownership = Ownership(TTL, max_lost=5)
    alive: set[str] = set()
    expected: dict[str, str] = {}
    for now, (change, replica, ids) in enumerate(changes):
        if change == "join":
            ownership.join(info(replica), ids, draining=False, now=now)
            alive.add(replica)
            expected |= dict.fromkeys(ids, replica)
        elif change == "leave":
            ownership.leave(replica, now=now)
            alive.discard(replica)
            expected = {t: owner for t, owner in expected.items() if owner != replica}
        elif change == "drain":
            ownership.drain(replica)
        elif change == "claim":
            for trajectory_id, owner in zip(ids, owners(ownership, ids, now), strict=True):
                assert owner == expected.get(trajectory_id, owner)
                assert owner in alive | {LOST, NOBODY}
                if owner in alive:
                    expected[trajectory_id] = owner
        else:
            ownership.release(replica, ids if change == "finish" else [], ids if change == "expire" else [], now=now)
            expected = {t: owner for t, owner in expected.items() if not (owner == replica and t in ids)}
        assert sum(ownership.owned(r) for r in alive) == len(expected)
        assert ownership.lost_count() <= 5
