"""Metrics of several replicas as one text."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from verl_tool.servers.replica.merged_metrics import merge_expositions


def exposition(calls: int) -> bytes:
    registry = CollectorRegistry()
    counter = Counter("verl_tool_calls", "Calls.", ["tool"], registry=registry)
    counter.labels("a").inc(calls)
    Gauge("queue", 'Text with "quotes" and \\.', registry=registry).set(calls / 2)
    Histogram("seconds", "Time.", buckets=(1.0, 2.0), registry=registry).observe(1.5)
    return generate_latest(registry)


def samples(text: bytes) -> dict[tuple[str, str, str], float]:
    return {
        (sample.name, sample.labels["replica"], sample.labels.get("le", "")): sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
    }


def test_every_sample_bears_its_replica():
    merged = samples(merge_expositions({"r1": exposition(3), "r2": exposition(5)}))
    assert merged["verl_tool_calls_total", "r1", ""] == 3
    assert merged["verl_tool_calls_total", "r2", ""] == 5
    assert merged["queue", "r2", ""] == 2.5
    assert merged["seconds_bucket", "r1", "2.0"] == 1
    assert merged["seconds_count", "r1", ""] == 1


def test_each_family_is_described_once():
    text = merge_expositions({"r1": exposition(1), "r2": exposition(2)}).decode()
    assert text.count("# TYPE verl_tool_calls_total ") == 1
    assert text.count("# TYPE seconds ") == 1


def test_one_replica_alone():
    assert samples(merge_expositions({"only": exposition(4)}))["verl_tool_calls_total", "only", ""] == 4


def test_what_is_no_exposition_is_refused():
    with pytest.raises(ValueError, match=r"."):
        merge_expositions({"r1": b"verl_tool_calls{ nonsense"})
