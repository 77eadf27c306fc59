"""Detect that a policy stops using its tools during a training, and find the likely cause in the metrics."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

CALLS = "agent/tool_calls/mean"
BROKEN = "agent/tool_calls/broken"
FAULTS = "agent/tool_calls/faults"
WITH_CALLS, WITHOUT_CALLS = "agent/reward/with_calls", "agent/reward/without_calls"
LIMITS = ("agent/stop/max_response_length", "agent/stop/max_action_length", "agent/stop/max_turns")
STEPS = 3
"""Number of steps in a row that must have few calls."""
MAX_STORED = 200
"""Maximum number of steps whose metrics are stored."""
_CONSIDERABLE = 0.3
"""Minimum share of calls, or of trajectories, that counts as the cause."""


class ToolUseCollapse:
    """Reports once that the calls per trajectory have stayed below a share of their peak."""

    def __init__(self, share: float) -> None:
        """`share` is relative to the highest mean number of calls per trajectory of any step so far."""
        self._share = share
        self._peak = 0.0
        self._peak_step = 0
        self._since: deque[Mapping[str, float]] = deque(maxlen=MAX_STORED)
        """Metrics of the steps since the peak."""
        self._low_steps = 0
        self._reported = False

    def check(self, metrics: Mapping[str, float], step: int) -> str | None:
        """Check a step's metrics. Returns a warning if the calls have collapsed, else None."""
        calls = metrics.get(CALLS)
        if calls is None or self._reported:
            return None
        if calls >= self._peak:
            self._peak, self._peak_step = calls, step
            self._since.clear()
        self._since.append({name: metrics[name] for name in _NAMES if name in metrics})
        self._low_steps = 0 if calls >= self._share * self._peak else self._low_steps + 1
        if self._low_steps < STEPS:
            return None
        self._reported = True
        return (
            f"step {step}: the calls have died out: {calls:.3g} a trajectory, for {STEPS} steps below {self._share:g} "
            f"of their highest mean, {self._peak:.3g} in step {self._peak_step} (metric_limits.tool_calls_share). "
            f"{describe_collapse(list(self._since))}"
        )


def describe_collapse(steps: Sequence[Mapping[str, float]]) -> str:
    """Describe the share of broken calls and the likely cause, from the metrics of steps, weighted by their calls."""
    faults, broken = _mean(steps, FAULTS), _mean(steps, BROKEN)
    share = "an unknown share" if broken is None else f"{broken:.0%}"
    cause = _cause(steps, faults, broken)
    return f"Since then {share} of the calls was broken: no tool understood them. Likely cause: {cause}"


def _cause(steps: Sequence[Mapping[str, float]], faults: float | None, broken: float | None) -> str:
    cut = sum(_mean(steps, name) or 0.0 for name in LIMITS)
    with_calls, without = _mean(steps, WITH_CALLS), _mean(steps, WITHOUT_CALLS)
    if faults is not None and faults >= _CONSIDERABLE:
        return f"{faults:.0%} of the calls ended in a fault; see agent/fault/* and the tool server's log"
    if broken is not None and broken >= _CONSIDERABLE:
        return (
            "calls that earn nothing, because they cannot be read or name no tool; see in trajectories/ how they are "
            "written, and whether the prompt teaches a format that the loop finds (python -m verl_tool.doctor)"
        )
    if cut >= _CONSIDERABLE:
        return (
            f"a limit ended {cut:.0%} of the trajectories while there were calls; raise data.max_response_length, "
            "agent.max_action_length or agent.max_turns, or lower agent.max_obs_length"
        )
    if with_calls is not None and without is not None and with_calls < without:
        return (
            f"a call costs reward: trajectories with calls had {with_calls:.3g} in the mean, those without "
            f"{without:.3g}; see whether the problems need the tool, and whether its answers reach the model"
        )
    rewards = {WITH_CALLS: with_calls, WITHOUT_CALLS: without}
    description = "".join(f", {name} {value:.3g}" for name, value in rewards.items() if value is not None)
    return (
        f"none that the metrics tell (limits ended {cut:.0%} of the trajectories, faults {faults or 0.0:.0%} of the "
        f"calls{description}); compare trajectories/ of before and after"
    )


_NAMES = (CALLS, BROKEN, FAULTS, WITH_CALLS, WITHOUT_CALLS, *LIMITS)


def _mean(steps: Sequence[Mapping[str, float]], name: str) -> float | None:
    """Return the mean of a metric over steps, weighted by their calls; None if no step with calls has it."""
    pairs = [(step[CALLS], step[name]) for step in steps if name in step and step[CALLS] > 0]
    weight = sum(calls for calls, _ in pairs)
    return sum(calls * value for calls, value in pairs) / weight if weight else None
