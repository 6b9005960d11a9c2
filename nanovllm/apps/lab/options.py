"""`CheckOptions`: what `nanovllm lab check` requires."""

import dataclasses
from typing import Annotated

from nanovllm.errors import ConfigError
from nanovllm.options.validation import check_fields, check_int, strict_keywords


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
