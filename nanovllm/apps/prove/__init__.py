"""`nanovllm prove`: does a request get the same bits however it is computed? Stands on `LLM`."""

from collections.abc import Iterable, Sequence as Seq
from typing import Annotated

from nanovllm.errors import ConfigError
from nanovllm.options.validation import (
    check_int,
    check_path,
    check_texts,
    checked_dataclass,
)


@checked_dataclass(ConfigError)
class ProveOptions:
    """What is compared, and where the results go.

    Raises:
        ConfigError: a field is unknown, of the wrong type, out of range, or contradicts another.
    """

    full: bool = False
    """Try more ways: further batch sizes, chunks and threads, longer prompts, and weights in 8 and
    4 bits."""
    num_requests: Annotated[int, check_int, 4, 1000] = 16
    """Number of requests."""
    ways: Annotated[Seq[str], check_texts] = ()
    """Try only the ways whose names contain this text. None is all."""
    lora_modules: Annotated[Seq[str], check_texts] = ()
    """LoRA adapters that requests take in turn, after the model alone; each name=path."""
    output: Annotated[str | None, check_path, "a file or None"] = None
    """File for the results as JSON; None writes none."""

    def chooses(self, name: str) -> bool:
        """Whether the way of this name is to be tried."""
        return not self.ways or any(text in name for text in self.ways)

    def check_ways(self, names: Iterable[str]) -> None:
        """Raise ConfigError if none of these ways is to be tried."""
        names = list(names)
        if not any(map(self.chooses, names)):
            raise ConfigError(
                f"ways {', '.join(self.ways)!r:.200} is in no way's name; the ways are: "
                f"{', '.join(names)}"
            )
