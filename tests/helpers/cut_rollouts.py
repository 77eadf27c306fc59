"""Random rollouts, and the same rollouts cut into rows."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from verl import DataProto

STATE, VOCABULARY = 5, 7


@dataclass(frozen=True)
class Whole:
    """One rollout. All tensors are by token: [length, …]"""

    prompt: str
    sample: int
    tensors: dict[str, torch.Tensor]
    reward: float
    baseline: float
    form: float

    @property
    def length(self) -> int:
        return len(self.tensors["response_mask"])


@dataclass
class Rows:
    """A batch of rows in the trainer's form, with the position of each in its rollout."""

    data: DataProto
    keys: list[str]
    lengths: list[int]
    starts: list[int]

    def by_token(self, name: str) -> dict[tuple[str, int], float]:
        """Return the value of each generated token by rollout and position."""
        found = {}
        for row, (key, start) in enumerate(zip(self.keys, self.starts, strict=True)):
            for place in range(self.lengths[row]):
                if self.data.batch["response_mask"][row, place]:
                    found[key.rsplit("_", 1)[0], start + place] = float(self.data.batch[name][row, place])
        return found


def make_rollouts(seed: int, prompts: int = 6, samples: int = 4) -> list[Whole]:
    """Make rollouts of 6 to 24 tokens, some of which are observations."""
    random = torch.Generator().manual_seed(seed)
    made = []
    for prompt in range(prompts):
        for sample in range(samples):
            length = int(torch.randint(6, 25, (1,), generator=random))
            mask = (torch.rand(length, generator=random) < 0.7).long()
            mask[0] = mask[-1] = 1
            turns = torch.cumsum(mask, 0) // 5 + 1
            tensors = {
                "response_mask": mask,
                "tokens": torch.randint(0, VOCABULARY, (length,), generator=random),
                "state": torch.randn(length, STATE, generator=random),
                "values": torch.randn(length, generator=random),
                "old_log_probs": -torch.rand(length, generator=random),
                "ref_log_prob": -torch.rand(length, generator=random),
                "rollout_log_probs": -torch.rand(length, generator=random),
                "sum_pi_squared": torch.rand(length, generator=random),
                "turn_ids": turns * mask,
            }
            reward, form = (int(torch.randint(0, 3, (1,), generator=random)) / 2 for _ in range(2))
            made.append(
                Whole(f"p{prompt}", sample, tensors, reward, float(torch.rand(1, generator=random)), float(form))
            )
    return made


def cut(rollouts: Sequence[Whole], max_rows: int, seed: int) -> Rows:
    """Cut each rollout at random into 1 to `max_rows` rows and shuffle them. The reward is on the last token."""
    random = np.random.default_rng(seed)
    pieces = []
    for whole in rollouts:
        count = int(random.integers(1, max_rows + 1))
        inner = random.choice(np.arange(1, whole.length), size=min(count, whole.length) - 1, replace=False)
        bounds = [0, *sorted(inner.tolist()), whole.length]
        pieces += [(whole, i, begin, end) for i, (begin, end) in enumerate(pairwise(bounds))]
    random.shuffle(pieces)
    keys = [f"{whole.prompt}_{whole.sample}_{i}" for whole, i, _, _ in pieces]
    lengths = [end - begin for _, _, begin, end in pieces]
    width = max(lengths)

    def padded(values: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.stack([torch.cat([v, v.new_zeros(width - len(v), *v.shape[1:])]) for v in values])

    columns = {
        name: padded([whole.tensors[name][begin:end] for whole, _, begin, end in pieces])
        for name in rollouts[0].tensors
    }
    scores = [torch.zeros(end - begin) for _, _, begin, end in pieces]
    for score, (whole, _, _, end) in zip(scores, pieces, strict=True):
        score[-1] = whole.reward if end == whole.length else 0.0
    columns["token_level_scores"] = padded(scores)
    columns["token_level_rewards"] = columns["token_level_scores"].clone()
    columns["reward_baselines"] = torch.tensor([whole.baseline for whole, *_ in pieces])
    rewards = [json.dumps([whole.reward] * int(whole.tensors["turn_ids"].max())) for whole, *_ in pieces]
    others: dict[str, Any] = {
        "uid": np.array([whole.prompt for whole, *_ in pieces], dtype=object),
        "acc": np.array([whole.reward for whole, *_ in pieces]),
        "form": np.array([whole.form for whole, *_ in pieces]),
        "turn_rewards": np.array(rewards, dtype=object),
    }
    batch = TensorDict(columns, batch_size=len(pieces))
    return Rows(DataProto(batch=batch, non_tensor_batch=others), keys, lengths, [begin for _, _, begin, _ in pieces])
