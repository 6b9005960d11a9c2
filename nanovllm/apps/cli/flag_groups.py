"""The flags that several commands have: those of the engine, and those of sampling."""

from collections.abc import Mapping

from nanovllm.options.config import Config
from nanovllm.options.flags import Parser, add_flags, fields_of
from nanovllm.options.sampling_params import CHAT_SAMPLING, SamplingParams

MAX_TOKENS = 512
"""max_tokens if neither a flag nor the checkpoint sets it."""
RECOMMENDED = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "max_tokens")
"""The fields of SamplingParams that a checkpoint may set."""


def add_engine_flags(parser: Parser, defaults: Mapping[str, str] | None = None) -> None:
    """Add a flag for each field of Config. `defaults` is that of `add_flags`."""
    group = parser.add_argument_group("engine")
    add_flags(group, Config, but={"model"}, defaults=defaults or {})


def add_sampling_flags(
    parser: Parser, *, is_chat: bool | None = False, defaults: Mapping[str, str] | None = None
) -> None:
    """Add a flag for each field of SamplingParams that Config does not have.

    Args:
        is_chat: whether the defaults that the help names are those of chats; None if a flag
            --chat decides.
        defaults: that of `add_flags`, for what is otherwise than in chats and completions.
    """
    own = {name: field.default for name, field in fields_of(SamplingParams).items()}
    own["max_tokens"] = MAX_TOKENS
    helps = {name: f"the checkpoint's, or else {own[name]}" for name in RECOMMENDED}
    for name, value in CHAT_SAMPLING.items():
        if is_chat:
            helps[name] = f"the checkpoint's, or else {value}"
        elif is_chat is None:
            helps[name] += f"; {value} with --chat"
    group = parser.add_argument_group("sampling")
    add_flags(group, SamplingParams, but=fields_of(Config), defaults=helps | dict(defaults or {}))
