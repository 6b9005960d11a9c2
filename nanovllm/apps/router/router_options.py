"""What a server of several models is told: which models, each with its names and options."""

import dataclasses
import json
import math
import os
import re
import tomllib
from collections.abc import Mapping, Sequence as Seq
from pathlib import Path
from typing import Annotated, Any

from nanovllm.apps.server.server_options import MAX_FILES, ServerOptions, check_options, model_name
from nanovllm.errors import ConfigError
from nanovllm.options.config import Config
from nanovllm.options.flags import Parser, add_flags, fields_of
from nanovllm.options.lora_request import named_adapters
from nanovllm.options.model_names import is_path
from nanovllm.options.validation import (
    Error,
    check_float,
    check_text,
    check_texts,
    checked_dataclass,
    did_you_mean,
    shown,
)

ENGINE_FIELDS = (
    *("lora_modules", "lora_directory", "max_waiting", "min_priority", "max_body_bytes"),
    *("request_timeout", "chat_template", "default_chat_template_kwargs"),
    *("tool_call_parser", "reasoning_parser", "log_level", "log_format"),
    "allowed_local_media_path",
)
"""The fields of ServerOptions that each model's engine has, and that its table may name."""
_OF_ENGINES = (*ENGINE_FIELDS, "read_timeout", "root_path", "max_connections")
"""With those that the router has and every engine too; all others are the router's alone."""
_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)")
_ALL = 0.9
"""The share of memory that models get which name none, all together."""


def _duration(error: Error, name: str, value: Any) -> str:
    text = check_text(error, name, value)
    if not re.fullmatch(rf"-?\d+(\.\d+)?|-?({_DURATION.pattern})+", text):
        rule = "must be a duration such as 30s, 5m or 1h30m, 0 or -1"
        raise error(f"{name} {rule}, got {shown(value)}")
    return text


@checked_dataclass(ConfigError)
class RouterOptions:
    """When the models of a server come and go.

    Raises:
        ConfigError: a field is unknown, of the wrong type or out of range.
    """

    keep_alive: Annotated[str, _duration] = "5m"
    """How long a model stays in memory after its last request, such as 30s, 5m or 1h; 0 is no
    longer than the request, and -1 is forever. A number alone counts seconds."""
    load_timeout: Annotated[float, check_float, 0.001] = 600.0
    """Seconds that a request may wait for its model, and that loading it may take."""

    @property
    def keep_alive_seconds(self) -> float:
        """`keep_alive` in seconds; infinite if it is negative."""
        if self.keep_alive.startswith("-"):
            return math.inf
        parts = _DURATION.findall(self.keep_alive)
        if not parts:
            return float(self.keep_alive)
        return sum(float(number) * _UNITS[unit] for number, unit in parts)


@dataclasses.dataclass(frozen=True)
class ModelSpec:
    """A model that a server has."""

    names: tuple[str, ...]
    """Its name, then its other names."""
    model: str
    engine: Mapping[str, Any]
    server: Mapping[str, Any]
    """Those of ServerOptions that were given, as far as they are an engine's."""
    share: float
    """Of the memory of the GPU, or of the machine without one."""

    @property
    def adapters(self) -> tuple[str, ...]:
        """The names of its adapters, which requests may name, too."""
        return tuple(named_adapters(self.server.get("lora_modules", ()), self.names))

    def words(self) -> list[str]:
        """Return the arguments of the command `nanovllm` that serves it."""
        engine = {**self.engine, "gpu_memory_utilization": self.share}
        return [
            "serve",
            f"--model={self.model}",
            f"--served-model-name={','.join(self.names)}",
            "--drain-seconds=0",  # that of the router is over when it ends an engine
            "--enable-sleep-mode",
            *_flags({**engine, **self.server}),
        ]


def add_router_flags(parser: Parser) -> None:
    group = parser.add_argument_group("several models")
    add_flags(group, RouterOptions)


def names_several(words: Seq[str]) -> bool:
    """Return whether MODEL words ask for a server of several models."""
    return len(words) > 1 or any(_is_table(word) or _named(word) for word in words)


def read_models(
    words: Seq[str], engine: Mapping[str, Any], server: Mapping[str, Any]
) -> list[ModelSpec]:
    """Return the models that the words of a command line name.

    Args:
        words: each a MODEL, NAME=MODEL with several names separated by commas, or a TOML file with
            a table for each model.
        engine: the fields of Config given for all of them.
        server: those of ServerOptions.

    Raises:
        ConfigError: a file or an option is wrong, or two models have one name.
    """
    shared = {**engine, **{name: server[name] for name in _OF_ENGINES if name in server}}
    # An engine may still have the connections of clients that have gone.
    most = 2 * server.get("max_connections", ServerOptions.max_connections)
    shared["max_connections"] = min(most, MAX_FILES)
    found: list[tuple[tuple[str, ...], dict[str, Any]]] = []
    for word in words:
        if _is_table(word):
            found += _tables(word)
        elif named := _named(word):
            names, model = named
            found.append((tuple(names.split(",")), {"model": model}))
        elif "/" in word or is_path(word) or os.path.exists(word):
            found.append(((model_name(word),), {"model": word}))
        else:
            raise ConfigError(
                f"{shown(word)} names no model: give a path, a hub id, which is OWNER/NAME, "
                "NAME=MODEL, or a TOML file; a flag takes several values only behind a MODEL"
            )
    if given_names := server.get("served_model_name"):
        if len(found) > 1:
            raise ConfigError("served_model_name is of one model: name several as NAME=MODEL")
        found = [(tuple(given_names.split(",")), found[0][1])]
    if server.get("dev_mode"):
        raise ConfigError("dev_mode is of a server of one model: give no name, and one MODEL")
    if len(found) > 1 and "trace_file" in engine:
        raise ConfigError(
            "trace_file is the file of one engine: give each model its own in its table"
        )
    specs = [_spec(names, {**shared, **own}, len(found)) for names, own in found]
    owners: dict[str, str] = {}
    for spec in specs:
        for name in (*spec.names, *spec.adapters):
            if name in owners:
                raise ConfigError(
                    f"two models have the name {shown(name)}: give one another, as NAME=MODEL"
                )
            owners[name] = spec.names[0]
    return specs


def _is_table(word: str) -> bool:
    return word.endswith(".toml")


def _named(word: str) -> tuple[str, str] | None:
    """Return the names and the model of NAME=MODEL; None if the word is a model alone."""
    names, equals, model = word.partition("=")
    return (names, model) if equals and not os.path.exists(word) and "/" not in names else None


def _tables(path: str) -> list[tuple[tuple[str, ...], dict[str, Any]]]:
    """Return the names and options of each model in a TOML file."""
    try:
        tables = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{shown(path)} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{shown(path)} is not TOML: {error}") from None
    found = []
    for name, table in tables.items():
        where = f"{path}: [{name}]"
        if not isinstance(table, dict):
            raise ConfigError(f"{path}: {shown(name)} must be a table, such as [{name}]")
        own = {key.replace("-", "_"): value for key, value in table.items()}
        aliases = check_texts(ConfigError, f"{where}: aliases", own.pop("aliases", []))
        if "model" not in own:
            raise ConfigError(f'{where} lacks its model, such as model = "Qwen/Qwen3-0.6B"')
        own["model"] = check_text(ConfigError, f"{where}: model", own["model"])
        known = {*fields_of(Config), *ENGINE_FIELDS}
        for key in own.keys() - known:
            raise ConfigError(f"{where}: there is no option {key!r}{did_you_mean(key, known)}")
        found.append(((name, *aliases), own))
    if not found:
        raise ConfigError(f"{shown(path)} names no model: it needs a table for each")
    return found


def _spec(names: tuple[str, ...], options: dict[str, Any], num_models: int) -> ModelSpec:
    """Return a model's spec, whose options are checked."""
    if any(not name or "," in name for name in names):
        raise ConfigError(f"the name {shown(','.join(names))} must have text and no comma")
    server = {name: options.pop(name) for name in _OF_ENGINES if name in options}
    share = options.pop("gpu_memory_utilization", _ALL / num_models)
    try:
        config = Config(**{**options, "gpu_memory_utilization": share})
        check_options(ServerOptions(served_model_name=",".join(names), **server), config)
    except ConfigError as error:
        raise ConfigError(f"model {shown(names[0])}: {error}") from error
    model = options.pop("model")
    return ModelSpec(names, model, options, server, config.gpu_memory_utilization)


def _flags(fields: Mapping[str, Any]) -> list[str]:
    """Return values of fields as flags of the command line."""
    words = []
    for name, value in fields.items():
        flag = f"--{name.replace('_', '-')}"
        if isinstance(value, bool):
            words.append(flag if value else f"--no-{flag[2:]}")
        elif isinstance(value, str | int | float):
            words.append(f"{flag}={value}")
        else:
            words.append(f"{flag}={json.dumps(value)}")
    return words
