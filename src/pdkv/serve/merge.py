"""Prometheus texts of several instances as one, for the router's `/metrics`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry, disable_created_metrics, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

disable_created_metrics()  # every counter would have a twin with its time of birth


class Snapshot(CollectorRegistry):
    """A registry of ready-made families, to be printed once."""

    def __init__(self, families: Iterable[Metric]) -> None:
        super().__init__(auto_describe=False)
        self._families = list(families)

    def collect(self) -> Iterator[Metric]:
        """The families."""
        return iter(self._families)


def merge_metrics(texts: Mapping[str, str], own: CollectorRegistry) -> bytes:
    """One Prometheus text of the instances' texts, each sample with the label ``instance`` (the key), and ``own``.

    Families of the same name are joined, as a family may occur only once. A text that is no Prometheus exposition is
    left out.
    """
    families: dict[str, Metric] = {}
    for instance, text in texts.items():
        try:
            parsed = list(text_string_to_metric_families(text))
        except ValueError:
            continue
        for family in parsed:
            merged = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            for sample in family.samples:
                labels = {**sample.labels, "instance": instance}
                merged.add_sample(sample.name, labels, sample.value, sample.timestamp, sample.exemplar)
    return generate_latest(Snapshot(families.values())) + generate_latest(own)
