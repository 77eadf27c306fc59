"""The curves that a run is shown by."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase


@dataclass(frozen=True)
class Curve:
    """One chart."""

    title: str
    pattern: str
    """Of the names of the metrics that it shows, as `fnmatch` has it."""
    form: str = "number"
    """number, share, seconds or tokens."""

    def names(self, told: Iterable[str]) -> list[str]:
        """Which of a run's metrics it shows."""
        return [name for name in told if fnmatchcase(name, self.pattern)]


CURVES = (
    Curve("reward", "critic/score/mean"),
    Curve("success", "agent/success/mean", "share"),
    Curve("validation", "val-core/*"),
    Curve("calls a trajectory", "agent/tool_calls/mean"),
    Curve("calls that no tool understood", "agent/tool_calls/broken", "share"),
    Curve("faults", "agent/faulted", "share"),
    Curve("left out of the loss", "agent/excluded", "share"),
    Curve("tokens of the response", "response_length/mean", "tokens"),
    Curve("tokens of the model", "agent/model_tokens/mean", "tokens"),
    Curve("turns", "agent/turns/mean"),
    Curve("cut by a limit of length", "agent/stop/max_response_length", "share"),
    Curve("entropy", "actor/entropy"),
    Curve("rollout-trainer difference", "training/rollout_probs_diff_mean"),
    Curve("KL of the update", "actor/ppo_kl"),
    Curve("gradient norm", "actor/grad_norm"),
    Curve("seconds a step", "timing_s/step", "seconds"),
    Curve("tokens a second", "perf/throughput"),
)
