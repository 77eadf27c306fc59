"""Prometheus metrics of one replica, in a separate registry.

Requests update plain numbers in one thread, which are converted to Prometheus' form when the metrics are scraped. The
library's counters take locks and would cost more than the rest of a small request.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

from verl_tool.protocol import FaultKind

PROMETHEUS_TEXT = "text/plain; version=0.0.4; charset=utf-8"
"""Content type of an exposition."""
NO_TOOL = "none"
"""The `tool` label for entries that reached no tool: an action without a call, or a rejected entry."""
_BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
"""Upper bounds of the histograms' buckets, in seconds."""


class ToolMetrics(Collector):
    """Counts the calls of the tools, and holds the registry."""

    def __init__(self, tool_names: Sequence[str]) -> None:
        self._calls: Counter[str] = Counter(dict.fromkeys(tool_names, 0))
        self._invalid: Counter[str] = Counter(dict.fromkeys((*tool_names, NO_TOOL), 0))
        self._errors: Counter[str] = Counter(dict.fromkeys(tool_names, 0))
        self._faults: Counter[tuple[str, ...]] = Counter()
        self._seconds = {name: _Durations() for name in tool_names}
        self.registry = CollectorRegistry()
        self.registry.register(self)

    def called(self, tool: str, seconds: float, *, valid: bool, error: bool) -> None:
        """Count a call of `tool` that was run."""
        self._calls[tool] += 1
        self._seconds[tool].observe(seconds)
        if not valid:
            self._invalid[tool] += 1
        if error:
            self._errors[tool] += 1

    def not_understood(self, tool: str = NO_TOOL) -> None:
        """Count an action without a call that could be run."""
        self._invalid[tool] += 1

    def faulted(self, kind: FaultKind, tool: str = NO_TOOL) -> None:
        """Count an entry that was answered with a fault."""
        self._faults[tool, kind.value] += 1

    def add_gauge(self, name: str, text: str, read: Callable[[], Mapping[str, float]]) -> None:
        """Add a gauge per tool. Its values are read when the metrics are scraped."""
        self.registry.register(_GaugePerTool(name, text, read))

    def exposition(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self.registry)

    def collect(self) -> Iterable[Metric]:
        per_tool = (
            ("verl_tool_calls", "Calls that were run.", self._calls),
            ("verl_tool_invalid_calls", "Calls or actions that could not be understood.", self._invalid),
            ("verl_tool_errors", "Calls that failed by the model's own doing.", self._errors),
        )
        for name, text, counts in per_tool:
            yield _counter(name, text, ["tool"], {(tool,): count for tool, count in counts.items()})
        yield _counter("verl_tool_faults", "Entries answered with a fault.", ["tool", "kind"], self._faults)
        text = "Time to run a call, without the wait for a place."
        yield _histogram("verl_tool_call_seconds", text, "tool", self._seconds)


class HttpMetrics(Collector):
    """Counts HTTP requests, in the registry of the tools' metrics."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._requests: Counter[tuple[str, ...]] = Counter()
        self._bytes: Counter[tuple[str, ...]] = Counter()
        self._seconds: dict[str, _Durations] = {}
        registry.register(self)

    def answered(self, route: str, status: int, seconds: float, bytes_in: int, bytes_out: int) -> None:
        """Count an answered request. `route` must be one of the server's paths and never text of the caller."""
        self._requests[route, str(status)] += 1
        self._bytes[route, "in"] += bytes_in
        self._bytes[route, "out"] += bytes_out
        durations = self._seconds.get(route)
        if durations is None:
            durations = self._seconds[route] = _Durations()
        durations.observe(seconds)

    def collect(self) -> Iterable[Metric]:
        yield _counter("verl_tool_http_requests", "HTTP requests answered.", ["route", "status"], self._requests)
        yield _counter("verl_tool_http_bytes", "Bytes of bodies.", ["route", "direction"], self._bytes)
        text = "Time from the request's head to the answer's end."
        yield _histogram("verl_tool_http_request_seconds", text, "route", self._seconds)


class _Durations:
    """A histogram of durations."""

    __slots__ = ("_counts", "_sum")

    def __init__(self) -> None:
        self._counts = [0] * (len(_BOUNDS) + 1)
        self._sum = 0.0

    def observe(self, seconds: float) -> None:
        self._counts[bisect_left(_BOUNDS, seconds)] += 1
        self._sum += seconds

    def buckets(self) -> list[tuple[str, float]]:
        """Return Prometheus' cumulative buckets: the upper bound as text, and the number of values up to it."""
        return list(zip((*map(str, _BOUNDS), "+Inf"), _running_sums(self._counts), strict=True))

    @property
    def sum(self) -> float:
        return self._sum


class _GaugePerTool(Collector):
    """Reads its values when the metrics are scraped, so that requests need not update them."""

    def __init__(self, name: str, text: str, read: Callable[[], Mapping[str, float]]) -> None:
        self._name, self._text, self._read = name, text, read

    def collect(self) -> Iterable[Metric]:
        family = GaugeMetricFamily(self._name, self._text, labels=["tool"])
        for tool, value in self._read().items():
            family.add_metric([tool], value)
        yield family


def _counter(name: str, text: str, labels: Sequence[str], counts: Mapping[tuple[str, ...], int]) -> Metric:
    family = CounterMetricFamily(name, text, labels=labels)
    for values, count in counts.items():
        family.add_metric(values, count)
    return family


def _histogram(name: str, text: str, label: str, durations: Mapping[str, _Durations]) -> Metric:
    family = HistogramMetricFamily(name, text, labels=[label])
    for value, each in durations.items():
        family.add_metric([value], each.buckets(), each.sum)
    return family


def _running_sums(counts: Iterable[int]) -> Iterator[int]:
    total = 0
    for count in counts:
        total += count
        yield total
