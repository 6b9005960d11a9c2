"""`ProveOptions`: what `nanovllm prove` compares, and where its results go."""

import dataclasses
from collections.abc import Iterable, Sequence as Seq
from typing import Annotated

from nanovllm.errors import ConfigError
from nanovllm.options.validation import (
    check_fields,
    check_int,
    check_path,
    check_place,
    check_text,
    check_texts,
    strict_keywords,
)

ENGINES = ("vllm", "llamacpp", "transformers")
"""Peers that run in a Python of their own."""


@strict_keywords(ConfigError)
@dataclasses.dataclass(frozen=True)
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
    reproduction: Annotated[str, check_path, "a file"] = "reproduction.py"
    """File for the script that shows the first difference."""
    output: Annotated[str | None, check_path, "a file or None"] = None
    """File for the results as JSON; None is no file."""
    peer: Annotated[str | None, check_text] = None
    """Ask another engine instead: the URL of a server with OpenAI's API, or "vllm", "llamacpp" or
    "transformers". MODEL is then the peer's. None is nanovllm itself."""
    peer_python: Annotated[str | None, check_path, "a Python or None"] = None
    """The Python in which the peer is installed; None is this one."""
    api_key: Annotated[str | None, check_text] = None
    """API key of the server. None is the environment variable OPENAI_API_KEY."""

    def __post_init__(self) -> None:
        check_fields(ConfigError, self)
        if self.peer is not None and not self.is_url and self.peer not in ENGINES:
            raise ConfigError(
                f"peer must be {', '.join(ENGINES)} or a URL such as http://localhost:8000, "
                f"got {self.peer!r:.200}"
            )
        if self.peer_python is not None and self.peer not in ENGINES:
            raise ConfigError(
                f"peer_python is for a peer that is installed ({', '.join(ENGINES)}), but peer is "
                f"{self.peer!r:.200}: leave peer_python out"
            )

    @property
    def is_url(self) -> bool:
        """Whether the peer is a server."""
        return self.peer is not None and self.peer.startswith(("http://", "https://"))

    def chooses(self, name: str) -> bool:
        """Whether the way of this name is to be tried."""
        return not self.ways or any(text in name for text in self.ways)

    def check_places(self) -> None:
        """Raise ConfigError if a file that may be written cannot be. A peer's answers have no
        script.
        """
        if self.output is not None:
            check_place("output", self.output)
        if self.peer is None:
            check_place("reproduction", self.reproduction)

    def check_ways(self, names: Iterable[str]) -> None:
        """Raise ConfigError if none of these ways is to be tried."""
        names = list(names)
        if not any(map(self.chooses, names)):
            raise ConfigError(
                f"ways {', '.join(self.ways)!r:.200} is in no way's name; the ways are: "
                f"{', '.join(names)}"
            )
