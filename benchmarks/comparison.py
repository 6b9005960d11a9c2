"""What `versus --json` writes and `plot` reads: the times of engines on the same cases.

    python -m benchmarks.comparison FILE...

prints one table of several such files. Needs only the standard library.
"""

import argparse
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
    cores: list[int] | None = None
    """The engines' cores; None: all."""
    versions: dict[str, str] = dataclasses.field(default_factory=dict)
    """Of the engines' packages."""
    tokens: dict[str, list[int]] = dataclasses.field(default_factory=dict)
    """For each case: tokens of its prompts and outputs, in the first round."""

    @classmethod
    def begin(cls, model: str, cores: list[int] | None = None) -> "Comparison":
        """Return a comparison without rows, with this process's command and machine."""
        command = f"python -m benchmarks.versus {shlex.join(sys.argv[1:])}"
        date = datetime.datetime.now(datetime.UTC).date().isoformat()
        processor = f"{processor_name()}, {os.cpu_count()} cores"
        return cls(command, date, processor, model, {}, {}, [], cores)

    @classmethod
    def load(cls, path: Path) -> "Comparison":
        """Return the comparison in a JSON file."""
        fields = json.loads(path.read_text(encoding="utf-8"))
        return cls(**{**fields, "rows": [Row(**row) for row in fields["rows"]]})

    def save(self, path: Path) -> None:
        """Write a JSON file."""
        fields = {**dataclasses.asdict(self), "rows": [row._asdict() for row in self.rows]}
        path.write_text(json.dumps(fields, indent=1) + "\n", encoding="utf-8")

    def table(self) -> list[str]:
        """Return a line for each row: what is computed, tokens a second, and the ratio."""
        lines = []
        for row in self.rows:
            prompts, outputs = self.tokens[row.case]
            is_prefill = prompts > 100 * outputs
            rate = (prompts if is_prefill else outputs) / row.median
            cells = [self.model, self.cases[row.case], row.engine, f"{row.median:.2f}"]
            cells += [f"{rate:.1f} {'in' if is_prefill else 'out'}", f"{row.ratio:.2f}"]
            lines.append(f"| {' | '.join(cells)} |")
        return lines


def processor_name() -> str:
    """Return the processor's name, or its architecture if the system does not say more."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def main() -> None:
    """Print one table of the files, and what they have in common."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.comparison", description=__doc__)
    parser.add_argument("files", nargs="+", type=Path)
    comparisons = [Comparison.load(file) for file in parser.parse_args().files]
    versions = {
        f"{name} {version}" for each in comparisons for name, version in each.versions.items()
    }
    processors = {each.processor for each in comparisons}
    print(f"{'; '.join(sorted(processors))}. {', '.join(sorted(versions))}.\n")
    print("| model | case | engine | seconds | tokens a second | time / first engine's |")
    print("| --- | --- | --- | --- | --- | --- |")
    for each in comparisons:
        print("\n".join(each.table()))


if __name__ == "__main__":
    main()
