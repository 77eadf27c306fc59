"""Prometheus metrics of one replica of the service, in a registry of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from eval_service.openai.usage import Usage
from verl_tool.agent_loop.generators.base import Generation
from verl_tool.agent_loop.trajectory import StopReason, Trajectory
from verl_tool.http.metrics import HttpMetrics

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800, 3600)


class ServiceMetrics:
    def __init__(self) -> None:
        registry = self.registry = CollectorRegistry()
        self.http = HttpMetrics(registry)
        self._ends = Counter("verl_tool_eval_answers", "Answers, by why they ended.", ["stop"], registry=registry)
        self._tokens = Counter("verl_tool_eval_tokens", "Tokens, by who wrote them.", ["author"], registry=registry)
        self._calls = Counter("verl_tool_eval_tool_calls", "Actions answered by tools.", ["valid"], registry=registry)
        self.cancelled = Counter("verl_tool_eval_cancelled", "Requests whose client left.", registry=registry)
        self._seconds = Histogram(
            "verl_tool_eval_answer_seconds",
            "Where the time of an answer went.",
            ["part"],
            buckets=_SECONDS,
            registry=registry,
        )
        self.first_chunk_seconds = Histogram(
            "verl_tool_eval_first_chunk_seconds",
            "Time to the first chunk of a stream.",
            buckets=_SECONDS,
            registry=registry,
        )
        for stop in StopReason:
            self._ends.labels(stop.value)

    def answered(self, trajectories: Sequence[Trajectory], usage: Usage) -> None:
        self._tokens.labels("prompt").inc(usage.prompt_tokens)
        self._tokens.labels("model").inc(usage.completion_tokens)
        self._tokens.labels("tool").inc(usage.tool_tokens)
        for trajectory in trajectories:
            self._ends.labels(trajectory.stop.value).inc()
            self._seconds.labels("model").observe(trajectory.timings.generate)
            self._seconds.labels("tools").observe(trajectory.timings.tools)
            self._seconds.labels("total").observe(trajectory.timings.total)
            for call in trajectory.calls:
                self._calls.labels(str(call.valid).lower()).inc()

    def sampled(self, prompt_tokens: int, generation: Generation, seconds: float) -> None:
        """Count one answer in a session of an agent."""
        stops = {"length": StopReason.MAX_RESPONSE_LENGTH, "aborted": StopReason.ABORTED}
        self._ends.labels(stops.get(generation.stop_reason or "", StopReason.ANSWERED).value).inc()
        self._tokens.labels("prompt").inc(prompt_tokens)
        self._tokens.labels("model").inc(len(generation.token_ids))
        self._seconds.labels("model").observe(seconds)
        self._seconds.labels("total").observe(seconds)

    def add_gauge(self, name: str, text: str, read: Callable[[], float]) -> None:
        Gauge(name, text, registry=self.registry).set_function(read)
