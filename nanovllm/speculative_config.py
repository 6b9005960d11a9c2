"""`SpeculativeConfig`: how draft tokens are proposed, by vLLM's names. Knows no other option."""

import dataclasses
import os
from collections.abc import Iterable
from typing import Any

from nanovllm.errors import ConfigError
from nanovllm.other_names import SPECULATIVE_METHODS, SPECULATIVE_NAMES
from nanovllm.validation import check_choice, check_int, shown, strict_keywords

METHODS = ("ngram", "draft_model", "eagle3", "auto")


@strict_keywords(ConfigError, SPECULATIVE_NAMES)
@dataclasses.dataclass(frozen=True)
class SpeculativeConfig:
    """The options of `Config.speculative_config`.

    Raises:
        ConfigError: a field is unknown, of the wrong type, out of range, or contradicts another.
    """

    method: str | None = None
    """How to propose: "ngram" (prompt lookup), "draft_model" or "eagle3"; "auto" is "ngram". None
    is what the model is: "eagle3" for an EAGLE-3 head, else "draft_model"."""
    model: str | None = None
    """Checkpoint of the draft network: a directory or hub id."""
    num_speculative_tokens: int | None = None
    """Most tokens to propose for a sequence in one step; None is 24 for ngram, else 8. A controller
    proposes as many of them as are expected to pay."""
    prompt_lookup_max: int = 4
    """Longest n-gram to look up, in tokens."""
    prompt_lookup_min: int = 2
    """Shortest n-gram to look up, in tokens."""

    def __post_init__(self) -> None:
        self._check_method_and_model()
        counts = ["prompt_lookup_max", "prompt_lookup_min"]
        if self.num_speculative_tokens is not None:
            counts.append("num_speculative_tokens")
        for name in counts:
            self._set(name, check_int(ConfigError, name, getattr(self, name), 1))
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ConfigError(
                f"prompt_lookup_min must be at most prompt_lookup_max, got "
                f"{self.prompt_lookup_min} and {self.prompt_lookup_max}"
            )

    @property
    def max_draft_tokens(self) -> int:
        """`num_speculative_tokens`, or its default."""
        if self.num_speculative_tokens is not None:
            return self.num_speculative_tokens
        return 24 if self.method == "ngram" else 8

    def for_architectures(self, architectures: Iterable[str]) -> "SpeculativeConfig":
        """Return the options for a draft network of these architectures, with the method.

        Raises:
            ConfigError: the method is for other networks.
        """
        is_eagle3 = any("eagle3" in name.lower() for name in architectures)
        method = "eagle3" if is_eagle3 else "draft_model"
        if self.method not in (None, method):
            kind = "an EAGLE-3 head" if is_eagle3 else "no EAGLE-3 head"
            raise ConfigError(
                f"speculative_config: {shown(self.model)} is {kind}, so method must be {method}, "
                f"got {shown(self.method)}"
            )
        return dataclasses.replace(self, method=method)

    def _check_method_and_model(self) -> None:
        if self.model is not None:
            if not isinstance(self.model, str | os.PathLike) or not os.fspath(self.model):
                raise ConfigError(
                    f"model must be a directory or a hub id, got {shown(self.model)}: it is the "
                    "checkpoint of the draft network"
                )
            self._set("model", os.fspath(self.model))
        if self.method is None:
            if self.model is None:
                raise ConfigError(
                    f"method must be one of {', '.join(METHODS)}, or model must name a draft "
                    "network: both are missing"
                )
            return
        known = isinstance(self.method, str)
        advice = SPECULATIVE_METHODS.get(self.method, "") if known else ""
        check_choice(ConfigError, "method", self.method, METHODS, advice)
        if self.method == "auto":
            self._set("method", "ngram")
        if self.method == "ngram" and self.model is not None:
            raise ConfigError(
                f"method ngram has no model, got {shown(self.model)}: leave the model out, or the "
                "method"
            )
        if self.method != "ngram" and self.model is None:
            raise ConfigError(
                f"method {self.method} needs a model: give the checkpoint of the draft network"
            )

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)
