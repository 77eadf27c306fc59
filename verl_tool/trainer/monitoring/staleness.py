"""Measure how old a step's trajectories are, and compare engine and trainer on those that are not.

A version is the number of weight updates before it: step k trains version k - 1. verl logs the age of each trajectory
(``training/off_policy/trajectory_staleness…``) and the importance weights (``rollout_corr/rollout_is_…``).
Written for verl 0.9.0 and 0.9.1.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from verl_tool.trainer.monitoring.metric_limits import FRESH_DIFF


def versions_of(tag: Mapping[str, Any]) -> tuple[int, int]:
    """Return the oldest and newest weights that sampled a row, from its tag in TransferQueue."""
    return int(tag["min_global_steps"]), int(tag["max_global_steps"])


def oldest_and_newest(versions: Iterable[tuple[int, int]]) -> tuple[int, int]:
    """Return the oldest and newest weights that sampled a rollout, from those of its rows."""
    oldest, newest = zip(*versions, strict=True)
    return min(oldest), max(newest)


def fresh_rows(tags: Sequence[Mapping[str, Any]], trained_version: int) -> list[int]:
    """Return the rows in which every token was sampled by the weights that are being trained."""
    fresh = (trained_version, trained_version)
    return [i for i, tag in enumerate(tags) if versions_of(tag) == fresh and not tag.get("is_padding")]


def probability_difference(
    log_probs: Sequence[torch.Tensor], rollout_log_probs: Sequence[torch.Tensor], masks: Sequence[torch.Tensor]
) -> dict[str, float]:
    """Return the mean and maximum absolute difference of probabilities over the tokens in the loss, if there are any.

    Each argument has one tensor per row. [response_length]
    """
    rows = zip(log_probs, rollout_log_probs, masks, strict=True)
    differences = [(trainer.float().exp() - engine.float().exp()).abs()[mask.bool()] for trainer, engine, mask in rows]
    flat = torch.cat(differences) if differences else torch.zeros(0)
    if not flat.numel():
        return {}
    return {f"{FRESH_DIFF}_mean": flat.mean().item(), f"{FRESH_DIFF}_max": flat.max().item()}
