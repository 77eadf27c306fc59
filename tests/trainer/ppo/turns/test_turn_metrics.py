from __future__ import annotations

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("verl")

from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from trajectories import faulted, solved  # noqa: E402

from verl_tool.trainer.ppo.causes import Outcome  # noqa: E402
from verl_tool.trainer.ppo.turns.turn_metrics import SHARE, turn_reward_metrics, variance_share  # noqa: E402


def outcome(turns: str, **fields: object) -> Outcome:
    """Of two turns."""
    return Outcome(replace(solved(), **{"reward": 1.0, **fields}), reward_extra_info={"turn_rewards": turns})


def test_each_turn_has_its_mean_over_who_has_it():
    one_turn = outcome("[0.4]", segments=solved().segments[:2])
    lost = Outcome(faulted(), reward_extra_info={"turn_rewards": "[]"})
    metrics = turn_reward_metrics([outcome("[0.2]"), outcome("[0.6, 0.5]"), one_turn, lost])
    assert metrics == pytest.approx({"agent/turn_reward/sum": 1.7 / 3, "agent/turn_reward/1": 0.4, "agent/turn_reward/2": 0.25})


def test_nothing_is_told_where_no_turn_is_rewarded():
    assert turn_reward_metrics([Outcome(solved().with_reward(1.0))]) == {}
    assert turn_reward_metrics([Outcome(faulted(), reward_extra_info={"turn_rewards": "[]"})]) == {}


def test_the_share_is_that_within_trajectories():
    mask = torch.tensor([[1, 1, 0], [1, 1, 0]])
    by_trajectory, by_turn = torch.tensor([[1.0, 1, 9], [-1, -1, 9]]), torch.tensor([[1.0, -1, 9], [1, -1, 9]])
    assert variance_share(by_trajectory, mask) == {SHARE: 0.0}
    assert variance_share(by_turn, mask) == {SHARE: 1.0}
    assert variance_share(by_trajectory + by_turn, mask) == {SHARE: 0.5}
    assert variance_share(torch.ones(2, 3), mask) == variance_share(by_turn, mask * 0) == {}


@given(st.lists(st.lists(st.floats(-3, 3), min_size=0, max_size=4), min_size=1, max_size=5))
def test_it_is_a_share(rows):
    advantages, mask = torch.zeros(len(rows), 4), torch.zeros(len(rows), 4, dtype=torch.int64)
    for i, row in enumerate(rows):
        advantages[i, : len(row)], mask[i, : len(row)] = torch.tensor(row), 1
    assert all(0 <= share <= 1 + 1e-9 for share in variance_share(advantages, mask).values())
