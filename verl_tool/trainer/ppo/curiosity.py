"""Add a bonus to trajectories that try what few of their group try, such as a tool call.

This is the curiosity of Pixel Reasoner (arXiv 2505.15966). For each trajectory, the reward manager reports a weight
under `CURIOSITY`, which is 0 if the trajectory did not try, and under `MIN_SHARE` the share of the group from which on
there is no bonus. The bonus is the weight times the difference between `MIN_SHARE` and the group's share. Invalid rows
and groups of a validation get no bonus.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import transfer_queue as tq
from tensordict import TensorDict

from verl import DataProto
from verl_tool.agent_loop.trajectory import BONUS
from verl_tool.agent_workers.reward_manager.base import CURIOSITY, MIN_SHARE
from verl_tool.trainer.ppo.graded_trajectories import GradedTrajectory


def curiosity_bonuses(columns: Mapping[str, Sequence[Any]], groups: Sequence[Any], out: Sequence[bool]) -> list[float]:
    """Return the bonus of each row, or an empty list if the reward manager does not use curiosity.

    `columns` are those of the reward manager by name, `groups` the prompt of each row, `out` marks invalid rows.
    """
    if CURIOSITY not in columns:
        return []
    worth = [0.0 if value is None or math.isnan(value) else float(value) for value in columns[CURIOSITY]]
    tried: dict[Any, list[bool]] = defaultdict(list)
    for group, value, left_out in zip(groups, worth, out, strict=True):
        if not left_out:
            tried[group].append(value > 0)
    shares = {group: sum(each) / len(each) for group, each in tried.items()}
    return [
        value * max(float(minimum) - shares[group], 0.0) if value and not left_out else 0.0
        for value, minimum, group, left_out in zip(worth, columns[MIN_SHARE], groups, out, strict=True)
    ]


def add_bonuses(output: DataProto, bonuses: Sequence[float]) -> None:
    """Add bonuses to the rewards in the older trainer's batch, on the last token of each response."""
    scores = output.batch["rm_scores"]
    last = output.batch["attention_mask"][:, -scores.shape[1] :].sum(dim=1) - 1
    scores[torch.arange(len(scores)), last] += torch.tensor(bonuses, dtype=scores.dtype)


def put_bonuses(keys: Sequence[str], partition_id: str, bonuses: Sequence[float]) -> None:
    """Add bonuses to the rewards in TransferQueue, where the newer trainers keep their rows."""
    rows = tq.kv_batch_get(keys=list(keys), partition_id=partition_id, select_fields=["rm_scores"])["rm_scores"]
    scores = [row.clone() for row in rows.unbind()]
    for row, bonus in zip(scores, bonuses, strict=True):
        row[-1] += bonus
    fields = {"rm_scores": torch.nested.as_nested_tensor(scores, layout=torch.jagged)}
    tq.kv_batch_put(keys=list(keys), partition_id=partition_id, fields=TensorDict(fields, batch_size=len(scores)))


def curiosity_metrics(outcomes: Sequence[GradedTrajectory], prefix: str = "agent") -> dict[str, float]:
    """Return the mean bonus as ``{prefix}/curiosity/mean``, or nothing if the reward manager does not use curiosity."""
    bonuses = [o.reward_extra_info[BONUS] for o in outcomes if BONUS in o.reward_extra_info]
    return {f"{prefix}/curiosity/mean": sum(bonuses) / len(bonuses)} if bonuses else {}
