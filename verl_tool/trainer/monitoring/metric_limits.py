"""Which of a training's metrics should stay where, and a line in the log when one does not.

The limits are the config's group `metric_limits`; what each means stands in `RULES`, and in `ToolUseCollapse` for that
of calls, which takes more than one metric.
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
"""verl's metric: how many updates behind the trained policy the oldest token of a step's trajectories is."""
FRESH_DIFF = "training/rollout_probs_diff_fresh"
"""Prefix of metrics: how far engine and trainer are apart where both had the same weights."""


@dataclass(frozen=True)
class Rule:
    """The range of one metric."""

    metric: str
    falling: bool
    """False: the metric stays at or below the limit, and above minus that. True: it stays at or above this share of its
    highest value yet."""
    advice: str
    fresh_metric: str | None = None
    """Replaces `metric` in a step that trains on what older weights sampled."""

    def metric_for(self, metrics: Mapping[str, float]) -> str:
        """The name of what is compared with the limit in the step of these metrics."""
        stale = metrics.get(OLDEST, 0) > 0
        return self.fresh_metric if stale and self.fresh_metric is not None else self.metric


RULES: Mapping[str, Rule] = {
    "ppo_kl": Rule(
        "actor/ppo_kl",
        False,
        "the update moves the policy too far: lower actor.optim.lr, raise actor.optim.lr_warmup_steps, or take fewer "
        "mini-batches a step (actor.ppo_mini_batch_size)",
    ),
    "clip_fraction": Rule(
        "actor/pg_clipfrac",
        False,
        "much of the gradient is cut off: lower actor.optim.lr, or take fewer mini-batches a step",
    ),
    "grad_norm": Rule(
        "actor/grad_norm",
        False,
        "one batch pulls hard: lower actor.optim.lr, take larger batches, and look for odd rewards in trajectories/",
    ),
    "entropy_share": Rule(
        "actor/entropy",
        True,
        "the policy explores no more: raise actor.entropy_coeff, actor.clip_ratio_high or rollout.temperature, and see "
        "in trajectories/ whether it repeats one answer",
    ),
    "probability_difference": Rule(
        "training/rollout_probs_diff_mean",
        False,
        "engine and trainer disagree on the same tokens: check the weight sync, the dtypes and that both have one "
        "vocabulary; algorithm.rollout_correction weighs what is left",
        fresh_metric=f"{FRESH_DIFF}_mean",
    ),
    "excluded": Rule(
        "agent/excluded",
        False,
        "these trajectories teach nothing: agent/fault/* tells the causes, trajectories/ each one",
    ),
}
"""By the limit's name in the config."""
CALLS_SHARE = "tool_calls_share"
"""Name of the limit that `ToolUseCollapse` looks at."""


class MetricWatch:
    """Says when a metric leaves its range, and when it is back. Knows of one start of a run."""

    def __init__(self, limits: Mapping[str, float | None]) -> None:
        """`limits`: by name, as in `RULES`; None is no limit. Raises ConfigError."""
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

    def look(self, metrics: Mapping[str, float], step: int) -> list[str]:
        """What to say of a step's metrics. It is written to the log too."""
        lines = [
            self._judge(name, metric, float(metrics[metric]), step)
            for name in self._limits
            if (metric := RULES[name].metric_for(metrics)) in metrics
        ]
        if self._calls is not None:
            lines.append(self._calls.look(metrics, step))
        reported = [line for line in lines if line is not None]
        for line in reported:
            logger.warning("%s", line)
        return reported

    def _judge(self, name: str, metric: str, value: float, step: int) -> str | None:
        rule, limit = RULES[name], self._limits[name]
        if rule.falling:
            # Not `max`, which may keep a value that is no number; such a value is outside of every range.
            if value > self._highest.get(name, -math.inf):
                self._highest[name] = value
            highest = self._highest.get(name, math.nan)
            inside, description = value >= limit * highest, f"{limit:g} of its highest value, {highest:.3g}"
        else:
            # verl's KL is the mean of a difference of log-probabilities: it is below 0 where the sampled ones rose.
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
