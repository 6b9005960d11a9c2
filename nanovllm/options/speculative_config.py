"""`SpeculativeConfig`: how draft tokens are proposed, under vLLM's names."""

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any

from nanovllm.errors import ConfigError
from nanovllm.options.plugins import check_plugin, installed, is_plugin
from nanovllm.options.validation import (
    Error,
    check_choice,
    check_int,
    check_path,
    checked_dataclass,
    shown,
)

NETWORK_METHODS = ("draft_model", "eagle3")
"""Methods that have a network, and so a model."""
METHODS = ("ngram", *NETWORK_METHODS, "mtp", "auto")
_OTHER_NAMES = {"auto": "ngram", "qwen3_5_mtp": "mtp", "qwen3_next_mtp": "mtp"}
"""Other names for methods; vLLM also has the longer names of "mtp"."""
MAX_LOOKUP = 128
"""Most tokens of an n-gram. A sequence's index takes 16 bytes for each of its tokens and each
length of n-grams."""


def _method(error: Error, name: str, value: Any) -> str:
    known = _OTHER_NAMES.get(value, value) if isinstance(value, str) else value
    is_ours = not isinstance(known, str) or known in METHODS
    if not is_ours and (is_plugin(known) or known in installed("proposer")):
        return check_plugin(error, name, known, "proposer")
    return check_choice(error, name, known, METHODS)


@checked_dataclass(ConfigError)
class SpeculativeConfig:
    """The options of `Config.speculative_config`.

    Raises:
        ConfigError: a field is unknown, of the wrong type, out of range, or contradicts another.
    """

    method: Annotated[str | None, _method] = None
    """How to propose: "ngram" (prompt lookup), "draft_model", "eagle3", or "mtp" for the layer that
    the model's own checkpoint has for drafts; "auto" is "ngram"; "module:Class" names a `Proposer`
    of yours. None is what the draft network is: "eagle3" for an EAGLE-3 head, otherwise
    "draft_model"."""
    model: Annotated[str | None, check_path, "a directory or a hub id"] = None
    """Checkpoint of the draft network: a directory or hub id."""
    num_speculative_tokens: Annotated[int | None, check_int, 1, 1024] = None
    """Most tokens to propose for a sequence in one step; None is 24 for ngram, 1 for mtp, which was
    trained for one, and 8 for another network. A controller proposes as many of them as are
    expected to pay."""
    prompt_lookup_max: Annotated[int, check_int, 1, MAX_LOOKUP] = 4
    """Longest n-gram to look up, in tokens."""
    prompt_lookup_min: Annotated[int, check_int, 1, MAX_LOOKUP] = 2
    """Shortest n-gram to look up, in tokens."""

    def __post_init__(self) -> None:
        method = self.method
        if method is None and self.model is None:
            raise ConfigError(
                f"method must be one of {', '.join(METHODS)}, or model must name a draft "
                "network: both are missing"
            )
        if method in NETWORK_METHODS and self.model is None:
            raise ConfigError(
                f"method {method} needs a model: give the checkpoint of the draft network"
            )
        if method not in (None, *NETWORK_METHODS) and self.model is not None:
            raise ConfigError(
                f"method {method} has no model, got {shown(self.model)}: leave the model out, "
                "or the method"
            )
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
        return {"ngram": 24, "mtp": 1}.get(self.method or "", 8)

    def for_network(self, config: Mapping[str, Any]) -> "SpeculativeConfig":
        """Return the options with the method that suits a draft network, if none was given.

        Args:
            config: the parsed config.json of the draft network.

        Raises:
            ConfigError: method is "draft_model", and the network is an EAGLE-3 head.
        """
        names = config.get("architectures")
        names = names if isinstance(names, list) else []
        found = any("eagle3" in str(name).lower() for name in names)
        if found or config.get("speculators_model_type") == "eagle3":
            if self.method == "draft_model":
                raise ConfigError(
                    f"speculative_config: {shown(self.model)} is an EAGLE-3 head: use method eagle3"
                )
            return dataclasses.replace(self, method="eagle3")
        return dataclasses.replace(self, method=self.method or "draft_model")
