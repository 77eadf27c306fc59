"""Invalid rows and every estimator of verl's that works on outcomes."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("verl")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from omegaconf import OmegaConf  # noqa: E402
from tensordict import TensorDict  # noqa: E402
from verl.trainer.ppo.core_algos import AdvantageEstimator  # noqa: E402
from verl.trainer.ppo.ray_trainer import compute_advantage  # noqa: E402

from verl import DataProto  # noqa: E402
from verl_tool.agent_loop.trajectory import LOOP_FAULT, REWARD_FAULT  # noqa: E402
from verl_tool.trainer.ppo.advantage import without_invalid  # noqa: E402

LENGTH, GROUP = 5, 4
ESTIMATORS = (
    AdvantageEstimator.GRPO,
    AdvantageEstimator.GAE,
    AdvantageEstimator.REINFORCE_PLUS_PLUS,
    AdvantageEstimator.REINFORCE_PLUS_PLUS_BASELINE,
    AdvantageEstimator.RLOO,
    AdvantageEstimator.OPO,
    AdvantageEstimator.GPG,
)


def make_batch(rewards: list[float], invalid: list[bool], column: str = LOOP_FAULT) -> DataProto:
    """Groups of `GROUP` rows; the reward stands on the last token; invalid rows have an empty mask."""
    n = len(rewards)
    torch.manual_seed(n)
    mask = torch.ones(n, LENGTH, dtype=torch.int64)
    mask[:, 1] = 0
    mask[np.array(invalid)] = 0
    scores = torch.zeros(n, LENGTH)
    scores[:, -1] = torch.tensor(rewards)
    told = invalid if column == LOOP_FAULT else ["grader: gone" if out else "" for out in invalid]
    tensors = {"token_level_rewards": scores, "response_mask": mask, "values": torch.rand(n, LENGTH)}
    return DataProto(
        batch=TensorDict(tensors, batch_size=n),
        non_tensor_batch={
            "uid": np.array([f"g{i // GROUP}" for i in range(n)], dtype=object),
            column: np.array(told, dtype=object),
        },
    )


def advantages(data: DataProto, estimator: AdvantageEstimator, compute=compute_advantage) -> torch.Tensor:
    config = OmegaConf.create({"use_pf_ppo": False, "f_norm": 1.0, "gamma": 1.0})
    return compute(data, adv_estimator=estimator, gamma=1.0, lam=0.95, config=config).batch["advantages"]


@pytest.mark.parametrize("column", [LOOP_FAULT, REWARD_FAULT])
@pytest.mark.parametrize("estimator", ESTIMATORS)
@settings(max_examples=25)
@given(data=st.data())
def test_a_invalid_row_is_as_if_it_had_never_been_sampled(estimator, column, data):
    n = GROUP * data.draw(st.integers(1, 3))
    rewards = data.draw(st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=n, max_size=n))
    # Two rows of each group are left, so that every estimator is defined.
    invalid = [i % GROUP >= 2 and data.draw(st.booleans()) for i in range(n)]
    batch = make_batch(rewards, invalid, column)
    kept = [i for i, out in enumerate(invalid) if not out]
    expected = advantages(batch.select_idxs(kept), estimator)
    found = advantages(batch, estimator, without_invalid(compute_advantage))
    assert torch.allclose(found[kept], expected, atol=1e-6)
    assert not found[np.array(invalid)].any()


def test_the_baseline_would_be_wrong_otherwise():
    """What this is for: a faulted row with reward 0 lowers its group's mean."""
    batch = make_batch([1.0, 1.0, 1.0, 0.0], [False, False, False, True])
    assert advantages(batch, AdvantageEstimator.GRPO)[0].abs().max() > 0.1
    fair = advantages(batch, AdvantageEstimator.GRPO, without_invalid(compute_advantage))
    assert fair.abs().max() < 1e-3


def test_a_batch_of_nothing_but_invalid_rows():
    batch = make_batch([1.0] * GROUP, [True] * GROUP)
    assert not advantages(batch, AdvantageEstimator.GRPO, without_invalid(compute_advantage)).any()
