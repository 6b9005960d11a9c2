"""`EngineArgs` and `AsyncEngineArgs`: the engine's options as vLLM's scripts hold them.

Knows no engine: whoever makes one takes `vars(engine_args)`.
"""

import argparse
import dataclasses
from typing import Any, TypeVar

from nanovllm import demo_model
from nanovllm.compat.flags import add_other_flags
from nanovllm.compat.other_names import CONFIG_NAMES
from nanovllm.options.config import Config
from nanovllm.options.flags import DashingParser as FlexibleArgumentParser, add_flags, fields_of

__all__ = ["AsyncEngineArgs", "EngineArgs", "FlexibleArgumentParser"]

Parser = TypeVar("Parser", bound="argparse._ActionsContainer")


def asked_for(options: dict[str, Any]) -> dict[str, Any]:
    """Return options without the fields of `Config` that are None, which ask for nothing."""
    fields = {field.name for field in dataclasses.fields(Config)}
    return {k: value for k, value in options.items() if value is not None or k not in fields}


class EngineArgs(Config):
    """The fields of `Config`, with a default for the model, and assignable.

    None is the default of any field. An assignment is checked like an argument.

    Raises:
        ConfigError: as `Config`.
    """

    def __init__(self, model: str | None = None, **options: Any) -> None:
        super().__init__(model=model or demo_model.default_model(), **asked_for(options))

    def __setattr__(self, name: str, value: Any) -> None:
        vars(self).update(vars(EngineArgs(**{**vars(self), name: value})))

    def __getattr__(self, name: str) -> None:
        """Return None for an option of vLLM's that is not here: it asks for nothing."""
        if name not in CONFIG_NAMES:
            raise AttributeError(f"EngineArgs has no field {name!r}", name=name, obj=self)

    @staticmethod
    def add_cli_args(parser: Parser, **_: Any) -> Parser:
        """Add a flag for each option to a parser, or to a group of its arguments."""
        parser.add_argument("--model", default=demo_model.default_model(), help="The model.")
        add_flags(parser, Config, but={"model"}, defaults={})
        parser.set_defaults(
            **{name: field.default for name, field in fields_of(Config).items() if name != "model"}
        )
        add_other_flags(parser, default=None)
        return parser

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> "EngineArgs":
        """Return the options in the arguments of `add_cli_args`."""
        names = [*(field.name for field in dataclasses.fields(Config)), *CONFIG_NAMES]
        return cls(**{name: getattr(args, name) for name in names if hasattr(args, name)})


class AsyncEngineArgs(EngineArgs):
    """The same for `AsyncLLM.from_engine_args`."""
