"""Bonuses that a group decides, and how they reach the rewards in both trainers' batches."""

from __future__ import annotations

import math

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("verl")

from stored_rows import StoredRows  # noqa: E402

from verl import DataProto  # noqa: E402
from verl_tool.agent_loop.trajectory import Author, Segment, StopReason, Trajectory  # noqa: E402
from verl_tool.trainer.ppo import curiosity, v1_trainer  # noqa: E402
from verl_tool.trainer.ppo.curiosity import add_bonuses, curiosity_bonuses, curiosity_metrics  # noqa: E402
from verl_tool.trainer.ppo.graded_trajectories import GradedTrajectory  # noqa: E402
from verl_tool.trainer.ppo.rollout_log import Rewards  # noqa: E402

NAN = math.nan


@pytest.mark.parametrize(
    ("worth", "bonuses"),
    [
        ([0.5, 0, 0, 0, 0, 0, 0, 0, 0, 0], [0.5 * (0.3 - 0.1)] + [0.0] * 9),
        ([0.5, 0.5, 0, 0, 0, 0, 0, 0, 0, 0], [0.05, 0.05] + [0.0] * 8),
        ([0.5, 0.5, 0.5, 0, 0, 0, 0, 0, 0, 0], [0.0] * 10),
        ([0.5] * 10, [0.0] * 10),
        ([0.0] * 10, [0.0] * 10),
    ],
)
def test_the_published_formula(worth, bonuses):
    columns = {"curiosity": worth, "min_share": [0.3] * 10}
    assert curiosity_bonuses(columns, ["a"] * 10, [False] * 10) == pytest.approx(bonuses)


def test_a_group_is_its_own_and_rows_that_do_not_count_are_not_of_it():
    columns = {"curiosity": [0.5, 0, NAN, 0.5, 0.5, None], "min_share": [1.0, 1.0, NAN, 1.0, 1.0, None]}
    groups, out = ["a", "a", "a", "b", "b", "b"], [False, False, True, False, True, True]
    assert curiosity_bonuses(columns, groups, out) == [0.25, 0, 0, 0, 0, 0]


def test_a_manager_without_curiosity_is_left_alone():
    assert curiosity_bonuses({"acc": [1.0]}, ["a"], [False]) == []


def test_a_bonus_is_added_where_the_reward_is():
    output = DataProto.from_dict(
        {
            "rm_scores": torch.tensor([[0.0, 1.0, 0.0], [0.0, 0.0, 0.0]]),
            "attention_mask": torch.tensor([[0, 1, 1, 1, 0], [1, 1, 1, 1, 1]]),
        }
    )
    add_bonuses(output, [0.25, 0.5])
    assert output.batch["rm_scores"].tolist() == [[0.0, 1.25, 0.0], [0.0, 0.0, 0.5]]


def test_the_newer_trainer_puts_it_into_its_rows(monkeypatch):
    store = StoredRows()
    monkeypatch.setattr(curiosity, "tq", store)
    batch = store.put({"p_0_0": {"rm_scores": torch.tensor([0.0, 1.0])}, "p_1_0": {"rm_scores": torch.tensor([0.0])}})
    told = Rewards(columns={"curiosity": [0.5, 0.0], "min_share": [1.0, 1.0]}, groups=["p", "p"])
    sums, told = v1_trainer.AgentTrainerMixin._with_curiosity(
        batch.keys, batch.partition_id, [1.0, 0.0], told, [False, False]
    )
    assert sums == [1.25, 0.0]
    assert told.columns["curiosity_bonus"] == [0.25, 0.0]
    assert [store.rows[key]["rm_scores"].tolist() for key in batch.keys] == [[0.0, 1.25], [0.0]]


def test_the_mean_bonus_is_a_metric():
    trajectory = Trajectory("t", (Segment(Author.PROMPT, (1,)),), StopReason.ANSWERED)
    outcomes = [GradedTrajectory(trajectory, reward_extra_info={"curiosity_bonus": bonus}) for bonus in (0.25, 0.0)]
    assert curiosity_metrics(outcomes) == {"agent/curiosity/mean": 0.125}
    assert curiosity_metrics([GradedTrajectory(trajectory)]) == {}
