from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("verl")

from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from verl_tool.agent_loop.trajectory import Author, Segment, StopReason, Trajectory  # noqa: E402
from verl_tool.trainer.ppo.graded_trajectories import GradedTrajectory  # noqa: E402
from verl_tool.trainer.ppo.turns.turn_metrics import SHARE, turn_reward_metrics, variance_share  # noqa: E402


def outcome(told: str | None, turns: int = 2, reward: float | None = 1.0) -> GradedTrajectory:
    """Of so many turns, with the turn rewards that are told."""
    written = (Segment(Author.MODEL, (3,)), Segment(Author.TOOL, (4,))) * turns
    trajectory = Trajectory("a", (Segment(Author.PROMPT, (1,)), *written), StopReason.ANSWERED, reward=reward)
    return GradedTrajectory(trajectory, reward_extra_info={} if told is None else {"turn_rewards": told})


def test_each_turn_has_its_mean_over_who_has_it():
    ungraded = outcome("[]", reward=None)
    metrics = turn_reward_metrics([outcome("[0.2]"), outcome("[0.6, 0.5]"), outcome("[0.4]", turns=1), ungraded])
    expected = {"sum": 1.7 / 3, "1": 0.4, "2": 0.25}
    assert metrics == pytest.approx({f"agent/turn_reward/{name}": mean for name, mean in expected.items()})


def test_nothing_is_told_where_no_turn_is_rewarded():
    assert turn_reward_metrics([outcome(None)]) == turn_reward_metrics([outcome("[]", reward=None)]) == {}


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
