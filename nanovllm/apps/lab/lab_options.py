"""`CheckOptions` and `BenchOptions`: what `nanovllm lab` checks and measures."""

import dataclasses
from collections.abc import Sequence as Seq
from typing import Annotated

from nanovllm.errors import ConfigError
from nanovllm.options.validation import (
    check_fields,
    check_int,
    check_path,
    check_texts,
    strict_keywords,
)


@strict_keywords(ConfigError)
@dataclasses.dataclass(frozen=True)
class CheckOptions:
    """What `nanovllm lab check` requires, and how long it tries.

    Raises:
        ConfigError: a field is unknown, of the wrong type, or out of range.
    """

    fair: bool = False
    """Require that users take turns, as they do by default."""
    num_runs: Annotated[int, check_int, 1, 1_000_000] = 400
    """Number of random runs, each of up to 40 calls."""

    def __post_init__(self) -> None:
        check_fields(ConfigError, self)


@strict_keywords(ConfigError)
@dataclasses.dataclass(frozen=True)
class BenchOptions:
    """What `nanovllm lab bench` measures, and where its results go.

    Raises:
        ConfigError: a field is unknown, of the wrong type, or out of range.
    """

    num_pairs: Annotated[int, check_int, 1, 1000] = 10
    """Number of pairs of fresh processes. More show smaller differences."""
    num_rounds: Annotated[int, check_int, 1, 1000] = 3
    """Number of rounds of each workload in each pair."""
    workloads: Annotated[Seq[str], check_texts] = ()
    """Measure only the workloads whose names contain this text. None is all four."""
    output: Annotated[str | None, check_path, "a file or None"] = None
    """File for all measurements as JSON; None is no file."""

    def __post_init__(self) -> None:
        check_fields(ConfigError, self)
