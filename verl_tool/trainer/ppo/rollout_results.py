"""Summarise a rollout in the few numbers that a progress bar shows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def rollout_results(
    metrics: Mapping[str, float],
    rewards: Sequence[float] | None,
    right: Sequence[float | None] | None,
    invalid: Sequence[bool],
) -> dict[str, float]:
    """Return means over the valid trajectories by display name.

    `metrics` are those of `tool_metrics`. `rewards`, `right` (1 for a right answer) and `invalid` have one entry per
    trajectory. Unknown values are left out.
    """
    means = {
        "reward": _mean(rewards, invalid),
        "success": _mean(right, invalid),
        "calls": metrics["agent/tool_calls/mean"],
    }
    if metrics["agent/faulted"]:
        means["faulted"] = metrics["agent/faulted"]
    return {name: mean for name, mean in means.items() if mean is not None}


def _mean(values: Sequence[float | None] | None, invalid: Sequence[bool]) -> float | None:
    if values is None:
        return None
    valid = [float(v) for v, out in zip(values, invalid, strict=True) if v is not None and not out]
    return sum(valid) / len(valid) if valid else None
