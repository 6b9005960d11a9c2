"""What `step --json` writes and tools/pictures/roofline.py draws: the times of decode steps.

Needs only the standard library.
"""

import dataclasses
import json
from pathlib import Path


@dataclasses.dataclass
class StepTimes:
    """The times of decode steps by batch size, the machine's limits, and how they were measured."""

    command: str
    date: str
    model: str
    dtype: str
    quantization: str | None
    context: int
    """Tokens of each sequence before its first step."""
    processor: str
    instruction_sets: list[str]
    """The C kernels use them. The first one computes products of bfloat16."""
    num_threads: int
    torch: str
    bytes_per_second: float
    """How fast all threads together read memory."""
    flop_per_second: float
    """How fast all threads multiply numbers of bfloat16 in registers."""
    weight_bytes: float
    """Bytes of weights that a step reads."""
    token_flop: float
    """Operations in all products of a token."""
    milliseconds: dict[int, dict[str, float]]
    """By batch size: the median of a step and of each of its parts."""

    @property
    def reading_limit(self) -> float:
        """Milliseconds to read the weights of a step."""
        return 1e3 * self.weight_bytes / self.bytes_per_second

    @property
    def arithmetic_limit(self) -> float:
        """Milliseconds to compute the products of a token."""
        return 1e3 * self.token_flop / self.flop_per_second

    @classmethod
    def load(cls, path: Path) -> "StepTimes":
        """Return the times in a JSON file."""
        fields = json.loads(path.read_text(encoding="utf-8"))
        times = {int(batch): parts for batch, parts in fields["milliseconds"].items()}
        return cls(**{**fields, "milliseconds": times})

    def save(self, path: Path) -> None:
        """Write a JSON file."""
        path.write_text(json.dumps(dataclasses.asdict(self), indent=1) + "\n", encoding="utf-8")
