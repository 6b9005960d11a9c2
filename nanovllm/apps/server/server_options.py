"""Options of the server: validated when made, never changed afterwards."""

import argparse
import dataclasses
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from nanovllm.errors import ConfigError
from nanovllm.options.config import Config
from nanovllm.options.flags import Parser, add_flags
from nanovllm.options.validation import (
    Error,
    check_choice,
    check_float,
    check_int,
    check_json_object,
    check_text,
    check_texts,
    checked_dataclass,
    shown,
)

API_KEY_VARIABLE = "NANOVLLM_API_KEY"
"""Environment variable with an API key, or several with commas between."""
_LEVELS = ("debug", "info", "warning", "error", "critical")
MAX_FILES = 10**6
"""Linux lets a process open 2**20 files, by default."""


def template_text(error: Error, name: str, value: Any) -> str:
    """Return a chat template, given as a file or as text; otherwise raise `error`."""
    given = check_text(error, name, value)
    if "{{" in given or "{%" in given:
        return given
    try:
        text = Path(given).read_text(encoding="utf-8")
    except (OSError, ValueError) as cause:
        reason = getattr(cause, "strerror", None) or cause
        raise error(f"{name} {shown(value)} cannot be read: {reason}") from cause
    if "{{" in text or "{%" in text:
        return text
    raise error(f"{name} {shown(value)} is not a template: it has neither {{{{ nor {{%")


def _path(error: Error, name: str, value: Any) -> str:
    if not isinstance(value, str) or not value.startswith("/") or value.endswith("/"):
        rule = 'must begin with "/" and not end with it, such as "/llm"'
        raise error(f"{name} {rule}, got {shown(value)}")
    return value


def _names(error: Error, name: str, value: Any) -> str:
    given = check_text(error, name, value)
    names = given.split(",")
    if not all(each and each == each.strip() for each in names) or len({*names}) < len(names):
        rule = "must be a name, or several different ones with commas between"
        raise error(f"{name} {rule}, got {shown(value)}")
    return given


def _origins(error: Error, name: str, value: Any) -> tuple[str, ...]:
    """Return origins as browsers write them, in lower case; another text would never match."""
    given = check_texts(error, name, value)
    for each in given:
        if each not in ("*", "null") and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^\s/A-Z]+", each):
            rule = 'must be "*" or origins such as "https://page.example:8443", without a path'
            raise error(f"{name} {rule}, got {shown(each)}")
    return given


@dataclasses.dataclass(frozen=True)
class AnswerOptions:
    """What is set for the requests of a server as for the rows of a batch."""

    served_model_name: Annotated[str | None, _names] = None
    """Name of the model in requests and answers, or several with commas between; None is the last
    part of its path, or its hub id."""
    lora_modules: Annotated[tuple[str, ...], check_texts] = ()
    """LoRA adapters that requests can name as their model, each name=path, or JSON such as {"name":
    "sql", "path": "/adapters/sql"}. They need enable_lora."""
    chat_template: Annotated[str | None, template_text] = None
    """File with a Jinja template, or the template itself. None is the checkpoint's template."""
    tool_call_parser: Annotated[str, check_text] = "auto"
    """Format of tool calls in answers; "auto" recognises it by the chat template."""
    reasoning_parser: Annotated[str, check_text] = "auto"
    """Format of reasoning in answers; "auto" recognises it by the chat template."""

    @property
    def parsers(self) -> tuple[str, str]:
        """The formats of tool calls and of reasoning."""
        return self.tool_call_parser, self.reasoning_parser


@checked_dataclass(ConfigError)
class ServerOptions(AnswerOptions):
    """Where the server listens, who may use it and how much it takes on.

    Raises:
        ConfigError: a field is unknown, of the wrong type or out of range.
    """

    host: Annotated[str, check_text] = "127.0.0.1"
    """Address to listen on; "0.0.0.0" is every interface."""
    port: Annotated[int, check_int, 0, 65535] = 8000
    """Port to listen on; 0 takes a free one."""
    uds: Annotated[str | None, check_text] = None
    """Path of a Unix socket to listen on instead of host and port. None is no such socket."""
    api_keys: Annotated[tuple[str, ...], check_texts, True] = dataclasses.field(
        default=(), repr=False
    )
    """Keys, one of which a request must bring; without keys everyone is let in."""
    lora_directory: Annotated[str | None, check_text] = None
    """Directory below which LoRA adapters lie that clients may load with /v1/load_lora_adapter, and
    unload, while the server runs. It needs enable_lora. None is that they may not."""
    max_waiting: Annotated[int, check_int, 1] = 2048
    """Maximum number of sequences that wait for the engine, not counting those that run; further
    requests get status 503."""
    max_connections: Annotated[int, check_int, 1, MAX_FILES] = 4096
    """Maximum number of open connections; further ones get status 503 and are closed."""
    min_priority: Annotated[int, check_int, -(2**31), 0] = 0
    """Lowest priority that a request may ask for. Lower values go first, before the turns of users,
    so a value below 0 is for clients that are trusted."""
    allowed_local_media_path: Annotated[str | None, check_text] = None
    """Directory of pictures that requests may name by their paths, in it or below it; None is that
    they may not. Nothing is fetched from a network."""
    max_body_bytes: Annotated[int, check_int, 1] = 16 * 2**20
    """Maximum size of a request's body in bytes: a picture of 12 MB fits. While Python reads a
    string of JSON, nothing else runs: 5 ms for a megabyte of escapes."""
    read_timeout: Annotated[float, check_float, 0.001] = 30.0
    """Seconds in which a request must have arrived, and in which a client must read on when it has
    stopped reading its answer."""
    request_timeout: Annotated[float | None, check_float, 0.001] = None
    """Seconds after which a request is ended with an error; None is no limit."""
    drain_seconds: Annotated[float, check_float, 0] = 30.0
    """Seconds that running requests have to finish after SIGTERM."""
    cors_origins: Annotated[tuple[str, ...], _origins] = ()
    """Origins of web pages that may use the server, such as "https://page.example"; "*" is every
    page."""
    root_path: Annotated[str | None, _path] = None
    """Path under which a proxy has the server, such as "/llm"; requests may come with it or
    without. None is no path."""
    default_chat_template_kwargs: Annotated[dict[str, Any] | None, check_json_object] = None
    """Variables of the template in every request, such as {"enable_thinking": false}; a
    request's own come before them. None: no variables."""
    enable_sleep_mode: bool = False
    """Let clients put the engine to sleep and wake it up, with POST /sleep and /wake_up."""
    dev_mode: bool = False
    """Let clients pause the engine, change its weights and put it to sleep, as trainers do: see
    docs/training.md. It needs API keys, unless only this machine can reach the server."""
    log_level: Annotated[str, check_choice, _LEVELS] = "info"
    """Least level of what is logged: debug has the probes of /health and /metrics too, info each
    request and what the engine chose at its start."""
    log_format: Annotated[str, check_choice, ("text", "json")] = "text"
    """Form of the log: text, or json for a line of JSON for each record, with a request's fields in
    "request"."""

    def __post_init__(self) -> None:
        for key in self.api_keys:
            if not key or not key.isascii() or not key.isprintable() or " " in key:
                raise ConfigError("an API key must be printable ASCII characters without spaces")
        if self.dev_mode and not (self.api_keys or self.is_local):
            raise ConfigError(
                f"dev_mode lets clients change the weights, and host {shown(self.host)} lets other "
                "machines in: give api_keys too, or leave host out"
            )

    @property
    def is_local(self) -> bool:
        """Whether only this machine can reach the server."""
        return bool(self.uds) or self.host in ("localhost", "::1") or self.host[:4] == "127."

    @property
    def allowed_hosts(self) -> frozenset[str] | None:
        """Names by which requests may call the server; None is any.

        A page whose name leads to 127.0.0.1 is of the server's origin to a browser. Its name in the
        header Host gives it away; a key, which such a page does not have, does as well.
        """
        if self.uds or self.api_keys or not self.is_local:
            return None
        here = ("localhost", "127.0.0.1", "[::1]")  # no page's name, nor is what follows
        return frozenset({*here, "0.0.0.0", "[::]", self.host})


def check_options(options: ServerOptions, config: Config) -> None:
    """Check what several options say together, before anything is loaded.

    Raises:
        ConfigError: a parser has no such name, the engine takes no adapters, or there is no
            directory of them.
    """
    from nanovllm.apps.server.output_parsers.answer_format import (
        find_answer_format,  # slow to import
    )

    find_answer_format(None, *options.parsers)
    for name in ("lora_modules", "lora_directory"):
        if getattr(options, name) and not config.enable_lora:
            raise ConfigError(
                f"{name}={shown(getattr(options, name))} is for adapters, but enable_lora is "
                f"False: give enable_lora=True too, or leave {name} out"
            )
    if options.lora_directory is not None and not os.path.isdir(options.lora_directory):
        raise ConfigError(f"lora_directory {shown(options.lora_directory)} is not a directory")


def keys_of_environment(environment: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """Return the API keys in the environment.

    Raises:
        ConfigError: the variable is set, and has no key.
    """
    given = environment.get(API_KEY_VARIABLE, "")
    keys = tuple(key for key in given.split(",") if key)
    if given and not keys:
        raise ConfigError(
            f"{API_KEY_VARIABLE} is {given!r}, which has no key: set one, or unset it"
        )
    return keys


def add_server_flags(parser: Parser) -> None:
    group = parser.add_argument_group("server")
    add_flags(group, ServerOptions, but={"api_keys"})
    group.add_argument(
        "--api-key",
        action="append",
        default=argparse.SUPPRESS,
        dest="api_keys",
        metavar="TEXT",
        help=f"A key that requests must bring. The flag may be repeated; {API_KEY_VARIABLE} in the "
        "environment, which other users of the machine cannot see, does the same. (default: none)",
    )


def model_name(model: str) -> str:
    """Return the last part of a local path, or the hub id as it is."""
    if os.path.exists(model):
        return os.path.basename(os.path.abspath(model))
    return model
