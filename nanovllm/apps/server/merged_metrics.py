"""The metrics of several processes on one page, as a server in front of engines answers."""

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


def merge(texts: Mapping[str, str], label: str, own: Iterable[Metric] = ()) -> bytes:
    """Return the samples of all texts in Prometheus' format; `label` says whose each is.

    Args:
        texts: in the same format, by name.
        own: families of the server itself, some of which the texts may have, too.
    """
    families: dict[str, Metric] = {}

    def named(family: Metric) -> Metric:
        new = Metric(family.name, family.documentation, family.type)
        return families.setdefault(family.name, new)

    for name, text in sorted(texts.items()):
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                labels = {**sample.labels, label: name}
                named(family).samples.append(sample._replace(labels=labels))
    for family in own:
        named(family).samples += family.samples
    return generate_latest(_Page(families.values()))
