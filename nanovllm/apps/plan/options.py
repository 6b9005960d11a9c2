"""The options of `nanovllm lab plan` and `nanovllm lab calibrate`."""

import dataclasses
import json
import re
from collections.abc import Sequence as Seq
from typing import Annotated, Any

from nanovllm.errors import ConfigError
from nanovllm.options.config import Config
from nanovllm.options.validation import (
    check_float,
    check_int,
    check_path,
    check_text,
    check_texts,
    checked_dataclass,
    did_you_mean,
)

MAX_REPLICAS = 10_000
OF_WORKERS = ("num_blocks", "max_num_batched_tokens", "max_model_len")
"""What a plan may change of what the workers found."""


@checked_dataclass(ConfigError)
class CalibrateOptions:
    """How long to measure, and where the result goes.

    Raises:
        ConfigError: a field is unknown, of the wrong type, or out of range.
    """

    seconds: Annotated[float, check_float, 5.0, 3600.0] = 90.0
    """How long to measure, after the model was loaded."""
    output: Annotated[str, check_path, "a file"] = "cost.json"
    """File for what was measured."""


@checked_dataclass(ConfigError)
class PlanOptions:
    """Which engines a plan has, and where its requests come from.

    Raises:
        ConfigError: a field is unknown, of the wrong type, out of range, or contradicts another.
    """

    cost: Annotated[str, check_path, "a file"] = "cost.json"
    """What `nanovllm lab calibrate` wrote."""
    replicas: Annotated[str, check_text] = "1"
    """How many replicas there are, or 1..64 to find the fewest that meet the objective."""
    trace: Annotated[str | None, check_path, "a file or None"] = None
    """A file of requests: Azure's, BurstGPT's or Mooncake's trace, or the log of `nanovllm serve`;
    None makes them."""
    speed: Annotated[float, check_float, 1e-6, 1e6] = 1.0
    """The trace's requests come so many times as fast."""
    acceptance: Annotated[float, check_float, 0.0, 1.0] = 0.7
    """With speculation: how likely a draft token is right, behind those before it."""
    option: Annotated[Seq[str], check_texts] = ()
    """An engine option that differs from the calibrated engine's, as NAME=VALUE."""
    beside: Annotated[Seq[str], check_texts] = ()
    """Options, as NAME=VALUE, of a second set of replicas for the same requests."""
    output: Annotated[str | None, check_path, "a file or None"] = None
    """File for the answers as JSON; None writes none."""
    page: Annotated[str | None, check_path, "a file or None"] = None
    """File for a page that draws the answers; None writes none."""

    def __post_init__(self) -> None:
        self.range_of_replicas()
        for text in (*self.option, *self.beside):
            option_of(text)

    def range_of_replicas(self) -> tuple[int, int]:
        """Return the fewest and the most replicas."""
        found = re.fullmatch(r"(\d{1,9})(?:\.\.(\d{1,9}))?", self.replicas)
        least, most = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
        if not 1 <= least <= most <= MAX_REPLICAS:
            raise ConfigError(
                f"replicas must be a number from 1 to {MAX_REPLICAS}, or two such as 1..64, got "
                f"{self.replicas!r:.100}"
            )
        return least, most


@checked_dataclass(ConfigError)
class Objective:
    """What most requests must get.

    Raises:
        ConfigError: a field is unknown, of the wrong type, or out of range.
    """

    slo_ttft: Annotated[float, check_float, 0.0, 1e6] = 2.0
    """Seconds to the first token, at most."""
    slo_tpot: Annotated[float, check_float, 0.0, 1e4] = 0.2
    """Seconds for each token behind it, on average, at most."""
    slo_share: Annotated[float, check_float, 0.0, 1.0] = 0.99
    """The share of the requests that must get both."""


@checked_dataclass(ConfigError)
class MadeRequests:
    """Requests that are made: how many, when, and of what length.

    Raises:
        ConfigError: a field is unknown, of the wrong type, or out of range.
    """

    num_requests: Annotated[int, check_int, 1, 10**9] = 1000
    """How many requests there are, turns of conversations included."""
    rate: Annotated[float, check_float, 1e-6, 1e6] = 1.0
    """Requests a second, on average."""
    burstiness: Annotated[float, check_float, 0.1, 100.0] = 1.0
    """Squared coefficient of variation of the times between arrivals: 1 is a Poisson process, more
    come in bursts, less are more even."""
    prompt_len: Annotated[int, check_int, 1, 10**6] = 512
    """Tokens of a prompt's own part: the median."""
    output_len: Annotated[int, check_int, 1, 10**6] = 128
    """Tokens of an output: the median."""
    spread: Annotated[float, check_float, 0.0, 3.0] = 0.5
    """Standard deviation of the logarithm of both lengths; 0: all are equal."""
    shared_len: Annotated[int, check_int, 0, 10**6] = 0
    """Tokens with which the prompts of a group begin, such as a system prompt."""
    num_groups: Annotated[int, check_int, 1, 10**6] = 1
    """How many such beginnings there are."""
    num_turns: Annotated[int, check_int, 1, 1000] = 1
    """Turns of a conversation. Each prompt has all that was said before it."""
    think_seconds: Annotated[float, check_float, 0.0, 1e5] = 10.0
    """From one turn of a conversation to the next, on average, which is also how long the answer
    takes."""
    seed: Annotated[int, check_int, 0, 2**63 - 1] = 0
    """Of the random numbers."""


def option_of(text: str) -> tuple[str, Any]:
    """Return the name and the value of NAME=VALUE."""
    name, found, value = text.partition("=")
    known = [*OF_WORKERS, *(field.name for field in dataclasses.fields(Config))]
    if not found or name not in known:
        raise ConfigError(
            f"an engine option must be NAME=VALUE, got {text!r:.100}{did_you_mean(name, known)}"
        )
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value
