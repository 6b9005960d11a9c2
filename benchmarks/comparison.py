"""What `versus --json` writes and `plot` reads: the times of engines on the same cases.

Needs only the standard library.
"""

import dataclasses
import datetime
import json
import os
import platform
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple


class Row(NamedTuple):
    """The time of one engine in one case."""

    case: str
    engine: str
    median: float
    """Seconds."""
    ratio: float
    """This engine's time divided by the first engine's: the median over rounds."""
    seconds: list[float]
    """Seconds of each round."""

    @classmethod
    def of_rounds(
        cls, case: str, engine: str, seconds: list[float], base: Sequence[float]
    ) -> "Row":
        """Return the row for the seconds of each round; `base` are the first engine's."""
        ratio = median(own / first for first, own in zip(base, seconds, strict=True))
        return cls(case, engine, median(seconds), ratio, seconds)


@dataclasses.dataclass
class Comparison:
    """The rows of a comparison, and how it was made."""

    command: str
    date: str
    processor: str
    model: str
    startup: dict[str, float]
    """For each engine: seconds from the start of its process until it is ready."""
    cases: dict[str, str]
    """For each case: its description in words."""
    rows: list[Row]

    @classmethod
    def begin(cls, model: str) -> "Comparison":
        """Return a comparison without rows, with this process's command and machine."""
        command = f"python -m benchmarks.versus {shlex.join(sys.argv[1:])}"
        date = datetime.datetime.now(datetime.UTC).date().isoformat()
        processor = f"{processor_name()}, {os.cpu_count()} cores"
        return cls(command, date, processor, model, {}, {}, [])

    @classmethod
    def load(cls, path: Path) -> "Comparison":
        """Return the comparison in a JSON file."""
        fields = json.loads(path.read_text(encoding="utf-8"))
        return cls(**{**fields, "rows": [Row(**row) for row in fields["rows"]]})

    def save(self, path: Path) -> None:
        """Write a JSON file."""
        fields = {**dataclasses.asdict(self), "rows": [row._asdict() for row in self.rows]}
        path.write_text(json.dumps(fields, indent=1) + "\n", encoding="utf-8")


def processor_name() -> str:
    """Return the processor's name, or its architecture if the system does not say more."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
