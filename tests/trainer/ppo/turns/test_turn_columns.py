"""How turns reach an estimator. Both trainers with `mt_grpo`: `test_estimators.py`."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("verl")

from tensordict import TensorDict  # noqa: E402
from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY, register_adv_est  # noqa: E402
from verl.trainer.ppo.ray_trainer import compute_advantage  # noqa: E402

from verl import DataProto  # noqa: E402
from verl_tool.errors import ConfigError  # noqa: E402
from verl_tool.trainer.ppo.advantage import without_invalid  # noqa: E402
from verl_tool.trainer.ppo.turns.turn_columns import takes_turn_rewards, takes_turns, turn_rewards  # noqa: E402


def batch(**columns: list[str]) -> DataProto:
    """Two rows of two turns and of one."""
    tensors = {
        "token_level_rewards": torch.tensor([[0.0, 0.0, 1.0], [0.0, 0.0, 0.0]]),
        "response_mask": torch.tensor([[1, 0, 1], [1, 0, 0]]),
        "turn_ids": torch.tensor([[1, 0, 2], [1, 0, 0]]),
    }
    told = {"uid": ["a", "a"], **columns}
    return DataProto(
        batch=TensorDict(tensors, batch_size=2),
        non_tensor_batch={name: np.array(values, dtype=object) for name, values in told.items()},
    )


def test_an_estimator_of_ones_own_is_told_of_turns(monkeypatch):
    """It names what it takes."""
    monkeypatch.setattr("verl.trainer.ppo.core_algos.ADV_ESTIMATOR_REGISTRY", dict(ADV_ESTIMATOR_REGISTRY))

    @register_adv_est("mine")
    def mine(token_level_rewards, response_mask, turn_ids, turn_rewards, config, **_others):
        own = torch.cat([torch.zeros(2, 1), turn_rewards], dim=1).gather(1, turn_ids) * response_mask
        return own, own

    assert takes_turns("mine")
    assert takes_turn_rewards("mine")
    assert not takes_turns("grpo")
    done = without_invalid(compute_advantage)(batch(turn_rewards=["[0.5, 2]", "[]"]), adv_estimator="mine", config={})
    assert done.batch["advantages"].tolist() == [[0.5, 0.0, 2.0], [0.0, 0.0, 0.0]]


def test_a_manager_that_rewards_no_turns_is_named_as_the_problem():
    with pytest.raises(ConfigError, match=r"mt_grpo needs a reward for each turn.*mt_torl"):
        without_invalid(compute_advantage)(batch(), adv_estimator="mt_grpo", config={})


def test_lists_of_unequal_length_are_one_tensor():
    assert turn_rewards(["[0.5]", "[]", "[1, 0.25]"], [2, 0, 3]).tolist() == [[0.5, 0, 0], [0, 0, 0], [1, 0.25, 0]]
    assert turn_rewards(["[]"], [0]).shape == (1, 0)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[1, 1, 1]", "row 1 has rewards for 3 turns, and the model wrote 2"),
        ("[NaN]", "finite"),
        ("[true]", "finite"),
        ('["1"]', "finite"),
        ("1.0", "list of finite numbers"),
    ],
)
def test_what_is_no_list_of_rewards_is_refused(text, told):
    with pytest.raises(ValueError, match=told):
        turn_rewards(["[]", text], [2, 2])
