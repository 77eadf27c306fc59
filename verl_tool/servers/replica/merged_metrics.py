"""Merge the Prometheus metrics of several replicas, each sample labelled with its replica."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

REPLICA_LABEL = "replica"


def merge_expositions(expositions: Mapping[str, bytes]) -> bytes:
    """Merge `expositions` (by replica id, in Prometheus' text format) into one text.

    Every sample gets the label ``replica``. Raises ValueError if a text cannot be parsed.
    """
    families: dict[str, Metric] = {}
    for replica_id, text in expositions.items():
        for family in text_string_to_metric_families(text.decode()):
            merged = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            for sample in family.samples:
                merged.samples.append(sample._replace(labels={**sample.labels, REPLICA_LABEL: replica_id}))
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Families(families.values()))
    return generate_latest(registry)


class _Families(Collector):
    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families
