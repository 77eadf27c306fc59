"""Check that a training's metrics stay within limits, and log a warning when one does not.

The limits are set in the config group `metric_limits`. `RULES` defines them, except for the limit on tool calls, which
needs several metrics and is in `ToolUseCollapse`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass

from verl_tool.errors import ConfigError
from verl_tool.trainer.monitoring.tool_use_collapse import ToolUseCollapse

logger = logging.getLogger(__name__)


OLDEST = "training/off_policy/trajectory_staleness_worst/max"
"""verl's metric for the age, in updates, of the oldest token in a step's trajectories."""
FRESH_DIFF = "training/rollout_probs_diff_fresh"
"""Prefix of metrics that compare the probabilities of engine and trainer with the same weights."""


@dataclass(frozen=True)
class Rule:
    """The range of one metric."""

    metric: str
    falling: bool
    """If False, the absolute value must not exceed the limit. If True, the metric must not fall below this share of its
    highest value so far."""
    advice: str
    fresh_metric: str | None = None
    """Replaces `metric` in a step that trains on samples of older weights."""

    def metric_for(self, metrics: Mapping[str, float]) -> str:
        """Return the name of the metric to compare with the limit in the step of these metrics."""
        stale = metrics.get(OLDEST, 0) > 0
        return self.fresh_metric if stale and self.fresh_metric is not None else self.metric


RULES: Mapping[str, Rule] = {
    "ppo_kl": Rule(
        "actor/ppo_kl",
        False,
        "the update moves the policy too far: lower actor.optim.lr, raise actor.optim.lr_warmup_steps, or use fewer "
        "mini-batches a step (actor.ppo_mini_batch_size)",
    ),
    "clip_fraction": Rule(
        "actor/pg_clipfrac",
        False,
        "much of the gradient is cut off: lower actor.optim.lr, or use fewer mini-batches per step",
    ),
    "grad_norm": Rule(
        "actor/grad_norm",
        False,
        "one batch dominates: lower actor.optim.lr, use larger batches, and check trajectories/ for odd rewards",
    ),
    "entropy_share": Rule(
        "actor/entropy",
        True,
        "the policy no longer explores: raise actor.entropy_coeff, actor.clip_ratio_high or rollout.temperature, and "
        "check in trajectories/ whether it repeats one answer",
    ),
    "probability_difference": Rule(
        "training/rollout_probs_diff_mean",
        False,
        "engine and trainer disagree on the same tokens: check the weight sync, the dtypes and that both have the same "
        "vocabulary; algorithm.rollout_correction corrects for the rest",
        fresh_metric=f"{FRESH_DIFF}_mean",
    ),
    "excluded": Rule(
        "agent/excluded",
        False,
        "these trajectories are not trained on: agent/fault/* has the causes, trajectories/ has each trajectory",
    ),
}
"""Rules by the name of the limit in the config."""
CALLS_SHARE = "tool_calls_share"
"""Name of the limit that `ToolUseCollapse` checks."""


class MetricWatch:
    """Reports when a metric leaves its range, and when it is back. It starts anew when a run is resumed."""

    def __init__(self, limits: Mapping[str, float | None]) -> None:
        """`limits` has the names of `RULES`; None means no limit. Raises ConfigError for an unknown or wrong limit."""
        unknown = sorted(set(limits) - {*RULES, CALLS_SHARE})
        if unknown:
            raise ConfigError(f"metric_limits.{unknown[0]} is unknown; known: {', '.join([*RULES, CALLS_SHARE])}")
        provided = {name: limit for name, limit in limits.items() if limit is not None}
        for name, limit in provided.items():
            highest = 1.0 if name == CALLS_SHARE or RULES[name].falling else math.inf
            if not 0 <= limit <= highest:
                raise ConfigError(f"metric_limits.{name}={limit}; it must be between 0 and {highest:g}, or null")
        share = provided.pop(CALLS_SHARE, None)
        self._calls = None if share is None else ToolUseCollapse(share)
        self._limits = provided
        self._highest: dict[str, float] = {}
        self._outside: set[str] = set()

    def check(self, metrics: Mapping[str, float], step: int) -> list[str]:
        """Check a step's metrics. Returns the warnings, which are logged too."""
        lines = [
            self._check_limit(name, metric, float(metrics[metric]), step)
            for name in self._limits
            if (metric := RULES[name].metric_for(metrics)) in metrics
        ]
        if self._calls is not None:
            lines.append(self._calls.check(metrics, step))
        reported = [line for line in lines if line is not None]
        for line in reported:
            logger.warning("%s", line)
        return reported

    def _check_limit(self, name: str, metric: str, value: float, step: int) -> str | None:
        rule, limit = RULES[name], self._limits[name]
        if rule.falling:
            # `max` could keep a NaN. NaN is outside of every range.
            if value > self._highest.get(name, -math.inf):
                self._highest[name] = value
            highest = self._highest.get(name, math.nan)
            inside, description = value >= limit * highest, f"{limit:g} of its highest value, {highest:.3g}"
        else:
            # verl's KL is a mean difference of log-probabilities. It is negative if those of the samples rose.
            inside, description = abs(value) <= limit, f"{limit:g}"
        where = f"step {step}: {metric} is {value:.3g}"
        if inside == (name not in self._outside):
            return None
        if inside:
            self._outside.remove(name)
            return f"{where}, back in its range (metric_limits.{name}: {description})"
        self._outside.add(name)
        side = "below" if rule.falling else "below minus" if value < 0 else "above"
        return f"{where}, {side} its limit (metric_limits.{name}: {description}); {rule.advice}"
