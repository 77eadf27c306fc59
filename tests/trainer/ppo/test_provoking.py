"""A policy that learns by GRPO gains nothing by making its own trajectories fault."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("verl")

from omegaconf import OmegaConf  # noqa: E402
from tensordict import TensorDict  # noqa: E402
from verl.trainer.ppo.ray_trainer import compute_advantage  # noqa: E402

from verl import DataProto  # noqa: E402
from verl_tool.agent_loop.actions import Action  # noqa: E402
from verl_tool.agent_loop.options import EpisodeOptions  # noqa: E402
from verl_tool.agent_loop.trajectory import (  # noqa: E402
    LOOP_FAULT,
    Excluded,
    StopReason,
)
from verl_tool.agent_loop.trajectory_builder import TrajectoryBuilder  # noqa: E402
from verl_tool.protocol import Fault, FaultKind, StepResult  # noqa: E402
from verl_tool.trainer.ppo.advantage import without_invalid  # noqa: E402

pytestmark = pytest.mark.slow

RIGHT, WRONG, PROVOKE = range(3)
HARD = 0.05
"""How often the policy is right where it tries."""
PROVOKABLE = [kind for kind in FaultKind if kind.provokable]


async def excluded(kind: FaultKind) -> bool:
    """Whether the loop leaves out a trajectory whose last call ended so."""
    builder = TrajectoryBuilder("t", True, {}, {}, started=0.0)
    fault = Fault(kind=kind, message="x", retryable=False)
    builder.record(Action("call"), StepResult("t", valid=False, fault=fault), 0.0)
    builder.fault = fault
    return builder.build(StopReason.FAULT, EpisodeOptions(enable_mtrl=True)).excluded is Excluded.FAULT


def provoking_after(excused: bool, steps: int = 150) -> float:
    """How probable the provoking action is at the end, of a policy that starts with 20% of it."""
    torch.manual_seed(0)
    logits = torch.tensor([HARD, 0.8 - HARD, 0.2]).log().requires_grad_()
    optimizer = torch.optim.SGD([logits], lr=0.5)
    compute = without_invalid(compute_advantage)
    for _ in range(steps):
        actions = torch.distributions.Categorical(logits=logits).sample((64,))
        rewards = torch.where(actions == RIGHT, 1.0, -1.0)
        out = (actions == PROVOKE).numpy() & excused
        tensors = {
            "token_level_rewards": torch.where(torch.from_numpy(out), 0.0, rewards).unsqueeze(1),
            "response_mask": torch.from_numpy(~out).long().unsqueeze(1),
        }
        columns = {"uid": np.repeat(np.arange(8), 8).astype(object), LOOP_FAULT: out.astype(object)}
        data = DataProto(batch=TensorDict(tensors, batch_size=64), non_tensor_batch=columns)
        config = OmegaConf.create({"use_pf_ppo": False})
        told = compute(data, adv_estimator="grpo", num_repeat=8, config=config).batch
        log_probs = logits.log_softmax(0)[actions]
        loss = -(told["advantages"][:, 0] * log_probs).sum() / told["response_mask"].sum().clamp(min=1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return float(logits.detach().softmax(0)[PROVOKE])


@pytest.mark.parametrize("kind", PROVOKABLE)
async def test_what_a_model_can_provoke_is_not_left_out(kind):
    assert not await excluded(kind)


@pytest.mark.parametrize("kind", [kind for kind in FaultKind if kind not in PROVOKABLE])
async def test_what_it_cannot_is(kind):
    assert await excluded(kind)


def test_provoking_gains_nothing():
    assert provoking_after(excused=False) < 0.1


def test_it_would_gain_if_it_were_excused():
    """What this is for: pushing wrong answers down lifts whatever is excused."""
    assert provoking_after(excused=True) > provoking_after(excused=False)
