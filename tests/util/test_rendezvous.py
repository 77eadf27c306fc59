"""Rendezvous hashing: the same owner for all, equal shares, and nobody moves without need."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_tool.util.rendezvous import owner

REPLICAS = st.lists(st.text(min_size=1), min_size=1, max_size=12, unique=True)


@given(st.text(), REPLICAS, st.randoms())
def test_the_order_of_the_replicas_does_not_matter(
    trajectory_id: str, replicas: list[str], shuffler: random.Random
) -> None:
    shuffled = list(replicas)
    shuffler.shuffle(shuffled)
    assert owner(trajectory_id, shuffled) == owner(trajectory_id, replicas)


@given(st.text(), REPLICAS, st.text(min_size=1))
def test_a_newcomer_takes_or_leaves_but_moves_nothing_between_the_others(
    trajectory_id: str, replicas: list[str], newcomer: str
) -> None:
    if newcomer not in replicas:
        assert owner(trajectory_id, [*replicas, newcomer]) in (owner(trajectory_id, replicas), newcomer)


@given(st.text(), REPLICAS)
def test_only_the_trajectories_of_one_that_leaves_move(trajectory_id: str, replicas: list[str]) -> None:
    first = owner(trajectory_id, replicas)
    for gone in replicas:
        rest = [replica for replica in replicas if replica != gone]
        if rest and gone != first:
            assert owner(trajectory_id, rest) == first


@pytest.mark.parametrize("count", [2, 4, 7, 16])
@pytest.mark.parametrize("ids", ["trajectory-{}", "{}", "00000000-0000-0000-0000-{:012d}"])
def test_shares_are_about_equal(count: int, ids: str) -> None:
    replicas = [f"replica-{i}" for i in range(count)]
    shares = Counter(owner(ids.format(i), replicas) for i in range(count * 500))
    assert len(shares) == count
    assert 350 < min(shares.values()) <= max(shares.values()) < 650


def test_the_owner_is_the_same_in_every_process_and_release() -> None:
    """Clients and replicas of different processes must agree: the values are part of the protocol."""
    owners = [owner(f"t{i}", ["a", "b", "c"]) for i in range(12)]
    assert "".join(owners) == "cacacbbbaaba"


def test_no_replica_is_an_error() -> None:
    with pytest.raises(ValueError, match="no replica"):
        owner("t", [])
