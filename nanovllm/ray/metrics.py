"""Joins the metrics of several replicas to one page for Prometheus. Knows no metric by name."""

from collections.abc import Iterable, Mapping

from prometheus_client import generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector


class _Page(Collector):
    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        """Return the families, for `generate_latest`."""
        return self._families


def merge(texts: Mapping[str, bytes]) -> bytes:
    """Return the samples of all texts in Prometheus' format, each with the label `replica`.

    Args:
        texts: in the same format, by name of the replica.
    """
    families: dict[str, Metric] = {}
    for replica, text in sorted(texts.items()):
        for family in text_string_to_metric_families(text.decode()):
            found = families.setdefault(
                family.name, Metric(family.name, family.documentation, family.type)
            )
            for sample in family.samples:
                labels = {**sample.labels, "replica": replica}
                found.samples.append(sample._replace(labels=labels))
    return generate_latest(_Page(families.values()))
