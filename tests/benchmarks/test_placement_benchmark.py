"""The ways to find a trajectory again: what each of them loses, in small."""

from __future__ import annotations

import pytest

from benchmarks.placement import WAYS, measure


@pytest.mark.parametrize("way", WAYS)
def test_every_trajectory_is_accounted_for_and_only_without_a_memory_does_one_begin_in_silence(way):
    row = measure(way, replicas=5, trajectories=300)
    dead = row["held by the dead"]
    assert row["go on"] + row["state_lost"] + row["begin in silence"] == 300
    if way in ("registry, any client", "owner named and pinned"):
        assert (row["state_lost"], row["begin in silence"]) == (dead, 0)
    else:
        assert row["state_lost"] == 0
        assert row["begin in silence"] >= dead > 0
