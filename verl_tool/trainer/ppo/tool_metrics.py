"""Compute metrics of a step's trajectories and tool calls."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

from verl_tool.agent_loop.trajectory import CallRecord, Excluded, StopReason, Trajectory
from verl_tool.trainer.ppo.graded_trajectories import CAUSES, LOST, GradedTrajectory

UNNAMED = "none"
"""Tool name of an action in which no format finds a call."""


def tool_metrics(trajectories: Sequence[Trajectory], prefix: str = "agent") -> dict[str, float]:
    """Return metrics by name. There must be at least one trajectory.

    ``{prefix}/…`` are metrics of trajectories: turns, calls, stop reasons, faults, tokens by author, seconds, rewards.
    ``{prefix}/tool/NAME/…`` are metrics of the calls of one tool, by the name that the model used.
    """
    n = len(trajectories)
    faults = excluded_metrics([GradedTrajectory(trajectory) for trajectory in trajectories], prefix=prefix)
    stops = {f"{prefix}/stop/{stop.value}": _share(t.stop is stop for t in trajectories) for stop in StopReason}
    return {
        f"{prefix}/turns/mean": sum(t.num_turns for t in trajectories) / n,
        f"{prefix}/turns/max": max(t.num_turns for t in trajectories),
        f"{prefix}/tool_calls/mean": sum(len(t.calls) for t in trajectories) / n,
        f"{prefix}/tool_calls/max": max(len(t.calls) for t in trajectories),
        **_call_shares(trajectories, prefix),
        **_rewards(trajectories, prefix),
        f"{prefix}/model_tokens/mean": sum(sum(t.response_mask) for t in trajectories) / n,
        f"{prefix}/observation_tokens/mean": sum(c.visible_tokens for t in trajectories for c in t.calls) / n,
        f"{prefix}/seconds/generate_mean": sum(t.timings.generate for t in trajectories) / n,
        f"{prefix}/seconds/tools_mean": sum(t.timings.tools for t in trajectories) / n,
        f"{prefix}/seconds/total_max": max(t.timings.total for t in trajectories),
        **stops,
        **faults,
        **_by_tool(trajectories, prefix),
    }


def excluded_metrics(outcomes: Sequence[GradedTrajectory], lost: int = 0, prefix: str = "agent") -> dict[str, float]:
    """Return the shares of trajectories that faulted or were excluded, by cause. `lost` of them never arrived.

    ``{prefix}/fault/CAUSE`` counts each fault, even if the trajectory stays in the loss. ``{prefix}/excluded/REASON``
    counts trajectories left out of the loss, with ``provokable`` and ``not_provokable`` by whether a model could cause
    it.
    """
    n = len(outcomes) + lost
    causes = Counter(outcome.cause for outcome in outcomes) + Counter({LOST: lost})
    out = [outcome for outcome in outcomes if outcome.trajectory.excluded is not None]
    reasons = Counter(outcome.trajectory.excluded for outcome in out)
    provokable = sum(outcome.provokable for outcome in out)
    return {
        f"{prefix}/faulted": 1 - causes[None] / n,
        **{f"{prefix}/fault/{cause}": causes[cause] / n for cause in CAUSES},
        f"{prefix}/excluded": (len(out) + lost) / n,
        **{f"{prefix}/excluded/{reason.value}": reasons[reason] / n for reason in Excluded},
        f"{prefix}/excluded/{LOST}": lost / n,
        f"{prefix}/excluded/provokable": provokable / n,
        f"{prefix}/excluded/not_provokable": (len(out) + lost - provokable) / n,
    }


def _call_shares(trajectories: Sequence[Trajectory], prefix: str) -> dict[str, float]:
    """Return shares of all calls, or nothing if there are none."""
    calls = [call for trajectory in trajectories for call in trajectory.calls]
    if not calls:
        return {}
    return {
        f"{prefix}/tool_calls/broken": _share(not call.valid and call.fault is None for call in calls),
        f"{prefix}/tool_calls/faults": _share(call.fault is not None for call in calls),
    }


def _rewards(trajectories: Sequence[Trajectory], prefix: str) -> dict[str, float]:
    """Return the mean rewards of trajectories with calls and of those without, where there are rewards."""
    metrics = {}
    for name, has_calls in (("with_calls", True), ("without_calls", False)):
        rewards = [t.reward for t in trajectories if t.reward is not None and bool(t.calls) is has_calls]
        if rewards:
            metrics[f"{prefix}/reward/{name}"] = sum(rewards) / len(rewards)
    return metrics


def _by_tool(trajectories: Sequence[Trajectory], prefix: str) -> dict[str, float]:
    calls: dict[str, list[CallRecord]] = defaultdict(list)
    for trajectory in trajectories:
        for call in trajectory.calls:
            for name in call.names or (UNNAMED,):
                calls[name].append(call)
    metrics: dict[str, float] = {}
    for name, records in calls.items():
        where = f"{prefix}/tool/{name}"
        seconds = sorted(record.seconds for record in records)
        metrics |= {
            f"{where}/calls": float(len(records)),
            f"{where}/valid": _share(record.valid for record in records),
            f"{where}/faults": _share(record.fault is not None for record in records),
            f"{where}/truncated": _share(record.truncated for record in records),
            f"{where}/seconds_p50": seconds[len(seconds) // 2],
            f"{where}/seconds_max": seconds[-1],
        }
    return metrics


def _share(flags: Iterable[bool]) -> float:
    values = list(flags)
    return sum(values) / len(values)
