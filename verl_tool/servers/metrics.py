"""Prometheus metrics of one replica, in a registry of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

from verl_tool.protocol import FaultKind

NO_TOOL = "none"
"""The `tool` label of what reached no tool: an action without a call, a refused entry."""
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)


class ToolMetrics:
    """Counts of what the tools did. `registry` may take further metrics of the same replica."""

    def __init__(self, tool_names: Sequence[str]) -> None:
        self.registry = CollectorRegistry()
        calls = Counter("verl_tool_calls", "Calls that were run.", ["tool"], registry=self.registry)
        invalid = Counter(
            "verl_tool_invalid_calls",
            "Calls or actions that could not be understood.",
            ["tool"],
            registry=self.registry,
        )
        errors = Counter(
            "verl_tool_errors", "Calls that failed by the model's own doing.", ["tool"], registry=self.registry
        )
        seconds = Histogram(
            "verl_tool_call_seconds",
            "Time to run a call, without the wait for a place.",
            ["tool"],
            buckets=_SECONDS,
            registry=self.registry,
        )
        self._faults = Counter(
            "verl_tool_faults", "Entries answered with a fault.", ["tool", "kind"], registry=self.registry
        )
        names = (*tool_names, NO_TOOL)
        self._calls = {name: calls.labels(name) for name in tool_names}
        self._invalid = {name: invalid.labels(name) for name in names}
        self._errors = {name: errors.labels(name) for name in tool_names}
        self._seconds = {name: seconds.labels(name) for name in tool_names}

    def called(self, tool: str, seconds: float, *, valid: bool, error: bool) -> None:
        """One call of `tool` was run."""
        self._calls[tool].inc()
        self._seconds[tool].observe(seconds)
        if not valid:
            self._invalid[tool].inc()
        if error:
            self._errors[tool].inc()

    def not_understood(self, tool: str = NO_TOOL) -> None:
        """An action had no call that could be run."""
        self._invalid[tool].inc()

    def faulted(self, kind: FaultKind, tool: str = NO_TOOL) -> None:
        """One entry was answered with a fault."""
        self._faults.labels(tool, kind.value).inc()

    def add_gauge(self, name: str, text: str, read: Callable[[], Mapping[str, float]]) -> None:
        """A gauge per tool whose values are read when somebody asks."""
        self.registry.register(_GaugePerTool(name, text, read))

    def exposition(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self.registry)


class HttpMetrics:
    """Counts of what came over the wire, in the registry of the tools' metrics."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._requests = Counter(
            "verl_tool_http_requests", "HTTP requests answered.", ["route", "status"], registry=registry
        )
        self._seconds = Histogram(
            "verl_tool_http_request_seconds",
            "Time from the request's head to the answer's end.",
            ["route"],
            buckets=_SECONDS,
            registry=registry,
        )
        self._bytes = Counter("verl_tool_http_bytes", "Bytes of bodies.", ["route", "direction"], registry=registry)
        self._known: dict[tuple[str, int], tuple[Counter, Histogram, Counter, Counter]] = {}

    def answered(self, route: str, status: int, seconds: float, bytes_in: int, bytes_out: int) -> None:
        """One request was answered. `route` is one of the server's own paths, never a caller's text."""
        children = self._known.get((route, status))
        if children is None:
            children = self._known[route, status] = (
                self._requests.labels(route, str(status)),
                self._seconds.labels(route),
                self._bytes.labels(route, "in"),
                self._bytes.labels(route, "out"),
            )
        requests, histogram, taken, given = children
        requests.inc()
        histogram.observe(seconds)
        taken.inc(bytes_in)
        given.inc(bytes_out)


class _GaugePerTool(Collector):
    """Reads its values when the metrics are asked for, so that nothing on the hot path keeps them."""

    def __init__(self, name: str, text: str, read: Callable[[], Mapping[str, float]]) -> None:
        self._name, self._text, self._read = name, text, read

    def describe(self) -> Iterable[Metric]:
        return [GaugeMetricFamily(self._name, self._text, labels=["tool"])]

    def collect(self) -> Iterable[Metric]:
        family = GaugeMetricFamily(self._name, self._text, labels=["tool"])
        for tool, value in self._read().items():
            family.add_metric([tool], value)
        return [family]
