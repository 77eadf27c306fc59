"""How many replicas there should be, by the entries that they run and queue.

Serve's own autoscaling counts the requests that came through it, of which there are none here. What runs and waits only
the replicas know: they report it (`ToolReplica.record_autoscaling_stats`).
"""

from __future__ import annotations

import math
from typing import Any

from ray.serve.config import AutoscalingConfig, AutoscalingContext, AutoscalingPolicy

from verl_tool.servers.settings import AutoscalingSettings

ENTRIES = "entries"
"""Name of the figure that each replica reports: entries that it runs or queues."""


class EntriesPolicy:
    """The number of replicas for the entries of all of them; Serve applies the bounds and the delays."""

    def __init__(self, target_entries: float) -> None:
        self._target = target_entries

    def __call__(self, context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        """Serve asks several times a second. The second part of the answer is state, of which there is none."""
        reported = (context.aggregated_metrics or {}).get(ENTRIES) or {}
        return max(1, math.ceil(sum(reported.values()) / self._target)), {}


def autoscaling_config(settings: AutoscalingSettings) -> AutoscalingConfig:
    """`settings` in Serve's form."""
    return AutoscalingConfig(
        min_replicas=settings.min_replicas,
        max_replicas=settings.max_replicas,
        initial_replicas=settings.min_replicas,
        target_ongoing_requests=settings.target_entries,
        upscale_delay_s=settings.upscale_delay_seconds,
        downscale_delay_s=settings.downscale_delay_seconds,
        look_back_period_s=settings.look_back_seconds,
        policy=AutoscalingPolicy(
            policy_function=EntriesPolicy, policy_kwargs={"target_entries": settings.target_entries}
        ),
    )
