"""The queries of the Grafana board and of the alert rules in deploy/prometheus."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import yaml

FOLDER = Path(__file__).parents[2] / "deploy/prometheus"
VARIABLES = {"$__rate_interval": "1m", "$model": ".*", "$job": ".*"}
"""What Grafana would put in their place."""


def queries() -> Iterator[str]:
    """Yield every query in PromQL."""
    for panel in json.loads((FOLDER / "grafana_board.json").read_text())["panels"]:
        for target in panel.get("targets", ()):
            query = target["expr"]
            for name, value in VARIABLES.items():
                query = query.replace(name, value)
            yield query
    for group in yaml.safe_load((FOLDER / "alerts.yml").read_text())["groups"]:
        yield from (rule["expr"] for rule in group["rules"])


def metrics_of(query: str) -> set[str]:
    """Return the names of metrics in a query."""
    return set(re.findall(r"\b(?:(?:vllm|nanovllm):\w+|process_\w+)", query))


def labels_of(query: str) -> set[str]:
    """Return the labels that a query names, but those that Prometheus itself adds."""
    grouped = ",".join(re.findall(r"\bby \(([^)]*)\)", query))
    named = {name.strip() for name in grouped.split(",")} | set(re.findall(r'(\w+)[=!]~?"', query))
    return named - {"", "instance", "job", "le"}
