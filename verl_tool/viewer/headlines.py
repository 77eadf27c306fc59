"""The curves that a run is shown by."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase


@dataclass(frozen=True)
class HeadlineCurve:
    title: str
    pattern: str
    """Of the names of the metrics that it shows, as `fnmatch` has it."""
    form: str = "number"
    """number, share, seconds or tokens."""

    def names(self, told: Iterable[str]) -> list[str]:
        """Which of a run's metrics it shows."""
        return [name for name in told if fnmatchcase(name, self.pattern)]


CURVES = (
    HeadlineCurve("reward", "critic/score/mean"),
    HeadlineCurve("success", "agent/success/mean", "share"),
    HeadlineCurve("validation", "val-core/*"),
    HeadlineCurve("calls a trajectory", "agent/tool_calls/mean"),
    HeadlineCurve("calls that no tool understood", "agent/tool_calls/broken", "share"),
    HeadlineCurve("faults", "agent/faulted", "share"),
    HeadlineCurve("left out of the loss", "agent/excluded", "share"),
    HeadlineCurve("tokens of the response", "response_length/mean", "tokens"),
    HeadlineCurve("tokens of the model", "agent/model_tokens/mean", "tokens"),
    HeadlineCurve("turns", "agent/turns/mean"),
    HeadlineCurve("cut by a limit of length", "agent/stop/max_response_length", "share"),
    HeadlineCurve("entropy", "actor/entropy"),
    HeadlineCurve("rollout-trainer difference", "training/rollout_probs_diff_mean"),
    HeadlineCurve("KL of the update", "actor/ppo_kl"),
    HeadlineCurve("gradient norm", "actor/grad_norm"),
    HeadlineCurve("seconds a step", "timing_s/step", "seconds"),
    HeadlineCurve("tokens a second", "perf/throughput"),
)
