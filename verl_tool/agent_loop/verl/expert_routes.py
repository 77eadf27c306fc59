"""The experts that a mixture-of-experts model chose while it sampled, for verl's router replay (R3).

Size: one byte (two from 257 experts on) for each token, layer and chosen expert. Qwen3-30B-A3B (48 layers, 8 of 128
experts) takes 384 bytes a token: 2 MB for a trajectory of 5,120 tokens, 8 GB for 4,096 of them. verl itself would carry
eight bytes each. Written for verl 0.9.0 and 0.9.1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from transformers import AutoConfig

from verl_tool.errors import ConfigError

_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")


@dataclass(frozen=True)
class ExpertRoutes:
    """The shape of a model's routes."""

    num_layers: int
    top_k: int
    """Experts of each token."""
    num_experts: int

    @classmethod
    def of_model(cls, folder: str, *, trust_remote_code: bool = False) -> ExpertRoutes:
        """The shape for the model in `folder`. Raises ConfigError if it has no experts."""
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code).get_text_config()
        counts = [count for name in _EXPERT_COUNTS if (count := getattr(config, name, None))]
        top_k = getattr(config, "num_experts_per_tok", None)
        if not counts or not top_k:
            raise ConfigError(
                f"actor_rollout_ref.rollout.enable_rollout_routing_replay=true with {folder}, a {config.model_type} "
                "model without experts; set it to false, and "
                "actor_rollout_ref.actor.megatron.router_replay.mode=disabled"
            )
        return cls(int(config.num_hidden_layers), int(top_k), int(counts[0]))

    def align(self, recorded: Any, total_tokens: int) -> np.ndarray:
        """Return one row for each token of a trajectory, prompt and observations included.

        `recorded`: the engine's routes of the last turn, ``[tokens, layers, top_k]``, or None. An engine records every
        token that it was fed, from the first of the prompt on, so that the last turn's routes are those of all tokens
        before it. Tokens that it was not fed are at the end: the last one generated, and an observation that no turn
        follows. No token in the loss depends on their routes. They get those of the token before them, since verl
        replays all rows but the last, and Megatron wants `top_k` different experts in each.

        Returns ``[total_tokens, layers, top_k]`` as uint8 (int16 from 257 experts on). Raises ConfigError if the engine
        gave another shape.
        """
        dtype = np.uint8 if self.num_experts <= 256 else np.int16
        shape = (self.num_layers, self.top_k)
        rows = np.empty((0, *shape), dtype) if recorded is None else np.asarray(recorded)[:total_tokens]
        if rows.shape[1:] != shape:
            raise ConfigError(
                f"the rollout engine's routes have the shape {rows.shape} (tokens, layers, experts), and the model's "
                f"config says {shape} for each token; set actor_rollout_ref.rollout.enable_rollout_routing_replay=false"
            )
        last = rows[-1:] if len(rows) else np.broadcast_to(np.arange(self.top_k), (1, *shape))
        filler = np.repeat(last, total_tokens - len(rows), axis=0)
        return np.concatenate([rows, filler]).astype(dtype, copy=False)
