"""What commands share: how they are added, and the flags of the engine and of sampling."""

import argparse
from collections.abc import Callable, Collection, Mapping
from typing import TypeAlias

from nanovllm.options.config import Config
from nanovllm.options.flags import Parser, add_flags, add_other_flags, fields_of
from nanovllm.options.sampling_params import CHAT_SAMPLING, SamplingParams

MAX_TOKENS = 512
"""max_tokens if neither a flag nor the checkpoint sets it."""
RECOMMENDED = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "max_tokens")
"""The fields of SamplingParams that a checkpoint may set."""

Commands: TypeAlias = "argparse._SubParsersAction[Parser]"
Command = Callable[[argparse.Namespace], int]
"""Runs with the parsed arguments, and returns the exit status. Its docstring is the help."""


def add_command(
    commands: Commands, run: Command, words: str, takes: str, more: str | None = None
) -> Parser:
    """Add a command, named as the function that runs it; return its parser.

    Args:
        words: what follows the name, for the help.
        takes: for the error of a word too many, such as "models takes one MODEL".
        more: what the help says at its end.
    """
    prog = commands._prog_prefix
    parser = commands.add_parser(
        run.__name__,
        help=run.__doc__,
        description=run.__doc__,
        epilog=more,
        usage=f"{prog} {run.__name__} {words}",
    )
    parser.set_defaults(command=run, parser=parser, takes=takes)
    return parser


def add_own_and_engine_flags(
    parser: Parser, groups: Mapping[str, tuple[type, Collection[str]]], *common: str
) -> None:
    """Add a command's own flags, which --help shows, and those of the engine.

    Args:
        groups: by title: the class whose fields are flags, and those that are left out.
        common: further flags that --help shows.
    """
    shown = list(common)
    for title, (owner, left_out) in groups.items():
        add_flags(parser.add_argument_group(title), owner, but=left_out)
        shown += [name for name in fields_of(owner) if name not in left_out]
    add_engine_flags(parser)
    add_other_flags(parser, default=argparse.SUPPRESS)  # after the flags that they may name
    parser.shorten_help(shown)


def add_engine_flags(parser: Parser, defaults: Mapping[str, str] | None = None) -> None:
    """Add a flag for each field of Config. `defaults` is that of `add_flags`."""
    add_flags(parser.add_argument_group("engine"), Config, but={"model"}, defaults=defaults)


def add_sampling_flags(
    parser: Parser, *, is_chat: bool | None = False, defaults: Mapping[str, str] | None = None
) -> None:
    """Add a flag for each field of SamplingParams that Config does not have.

    Args:
        is_chat: whether the defaults that the help names are those of chats; None if a flag
            --chat decides.
        defaults: that of `add_flags`, where it is not that of chats and completions.
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
