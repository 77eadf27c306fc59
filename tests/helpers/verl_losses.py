"""verl's losses with small configurations."""

from __future__ import annotations

from functools import partial
from typing import Any

from verl.workers.config import CriticConfig, FSDPActorConfig, PolicyLossConfig
from verl.workers.utils.losses import ppo_loss, value_loss

MODES = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")


def make_actor_loss(mode: str, policy_loss: dict[str, Any], **options: Any) -> Any:
    """Make the policy loss with the aggregation `mode`. `policy_loss` and `options` are verl's."""
    config = FSDPActorConfig(
        strategy="fsdp2",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        loss_agg_mode=mode,
        loss_scale_factor=7,
        policy_loss=PolicyLossConfig(dro_beta=0.1, **policy_loss),
        **options,
    )
    return partial(ppo_loss, config)


def critic_loss(mode: str) -> Any:
    """Make the value loss with the aggregation `mode`."""
    config = CriticConfig(strategy="fsdp2", ppo_micro_batch_size_per_gpu=1, loss_agg_mode=mode, loss_scale_factor=7)
    return partial(value_loss, config)
