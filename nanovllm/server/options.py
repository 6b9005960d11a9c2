"""Options of the server: validated when made, never changed afterwards.

Knows no engine option: those are `Config`'s.
"""

import argparse
import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path

from nanovllm.errors import ConfigError
from nanovllm.options.flags import Parser, add_flags
from nanovllm.options.validation import check_float, check_int, shown, strict_keywords

API_KEY_VARIABLE = "NANOVLLM_API_KEY"
"""Environment variable with an API key, or several with commas between."""


@strict_keywords(ConfigError)
@dataclasses.dataclass(frozen=True)
class ServerOptions:
    """Where the server listens, who may use it and how much it takes on.

    Raises:
        ConfigError: a field is unknown, of the wrong type or out of range.
    """

    host: str = "127.0.0.1"
    """Address to listen on; "0.0.0.0" is every interface."""
    port: int = 8000
    """Port to listen on; 0 takes a free one."""
    uds: str | None = None
    """Path of a Unix socket to listen on instead of host and port. None is no such socket."""
    api_keys: tuple[str, ...] = dataclasses.field(default=(), repr=False)
    """Keys, one of which a request must bring; without keys everyone is let in."""
    served_model_name: str | None = None
    """Name of the model in requests and answers; None is the last part of its path, or its hub
    id."""
    max_waiting: int = 2048
    """Maximum number of sequences that wait for the engine beside those that run; further requests
    get status 503."""
    max_connections: int = 4096
    """Maximum number of open connections; further ones get status 503 and are closed."""
    min_priority: int = 0
    """Lowest priority that a request may ask for. Lower values go first, before the turns of users,
    so a value below 0 is for clients that are trusted."""
    max_body_bytes: int = 4 * 2**20
    """Maximum size of a request's body in bytes. While Python reads a string of JSON, nothing else
    runs: 5 ms for a megabyte of escapes."""
    read_timeout: float = 30.0
    """Seconds in which a request must have arrived, and in which a client must read on when it has
    stopped reading its answer."""
    request_timeout: float | None = None
    """Seconds after which a request is ended with an error; None is no limit."""
    drain_seconds: float = 30.0
    """Seconds that running requests have to finish after SIGTERM."""
    cors_origins: tuple[str, ...] = ()
    """Origins of web pages that may use the server; "*" is every page."""
    root_path: str | None = None
    """Path under which a proxy has the server, such as "/llm"; requests may come with it or
    without. None is no path."""
    chat_template: str | None = None
    """File with a Jinja template, or the template itself. None is the checkpoint's template."""
    tool_call_parser: str = "auto"
    """Format of tool calls in answers; "auto" recognises it by the chat template."""
    reasoning_parser: str = "auto"
    """Format of reasoning in answers; "auto" recognises it by the chat template."""

    def __post_init__(self) -> None:
        for name in ("host", "tool_call_parser", "reasoning_parser"):
            self._check_text(name)
        path = self.root_path
        if path is not None and not (
            isinstance(path, str) and path.startswith("/") and not path.endswith("/")
        ):
            raise ConfigError(
                'root_path must begin with "/" and not end with it, such as "/llm", '
                f"got {shown(self.root_path)}"
            )
        for name in ("uds", "served_model_name", "chat_template"):
            if getattr(self, name) is not None:
                self._check_text(name)
        self._set("port", check_int(ConfigError, "port", self.port, 0, 65535))
        for name in ("max_waiting", "max_body_bytes"):
            self._set(name, check_int(ConfigError, name, getattr(self, name), 1))
        # Linux lets a process open 2**20 files, by default.
        most = check_int(ConfigError, "max_connections", self.max_connections, 1, 10**6)
        self._set("max_connections", most)
        lowest = check_int(ConfigError, "min_priority", self.min_priority, -(2**31), 0)
        self._set("min_priority", lowest)
        for name in ("read_timeout", "request_timeout"):
            if getattr(self, name) is not None:
                self._set(name, check_float(ConfigError, name, getattr(self, name), 0.001))
        self._set("drain_seconds", check_float(ConfigError, "drain_seconds", self.drain_seconds, 0))
        self.read_chat_template()  # fails now if it cannot be read
        for name in ("api_keys", "cors_origins"):
            value = getattr(self, name)
            if not isinstance(value, list | tuple) or not all(isinstance(v, str) for v in value):
                raise ConfigError(f"{name} must be a list of strings")  # keys are never shown
            self._set(name, tuple(value))
        for key in self.api_keys:
            if not key or not key.isascii() or not key.isprintable() or " " in key:
                raise ConfigError("an API key must be printable ASCII characters without spaces")

    def read_chat_template(self) -> str | None:
        """Return the text of the chat template; None is the checkpoint's.

        Raises:
            ConfigError: the file cannot be read.
        """
        given = self.chat_template
        if given is None or "{{" in given or "{%" in given:
            return given
        try:
            return Path(given).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise ConfigError(f"chat_template {shown(given)} cannot be read: {reason}") from error

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
        return frozenset({"localhost", "127.0.0.1", "[::1]", self.host})

    def _check_text(self, name: str) -> None:
        value = getattr(self, name)
        if not isinstance(value, str) or not value:
            raise ConfigError(f"{name} must be a string that is not empty, got {shown(value)}")

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)


def keys_of_environment(environment: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """Return the API keys in the environment."""
    return tuple(key for key in environment.get(API_KEY_VARIABLE, "").split(",") if key)


def add_server_flags(parser: Parser) -> None:
    """Add a flag for each field of ServerOptions."""
    group = parser.add_argument_group("server")
    add_flags(group, ServerOptions, but={"api_keys"}, defaults={})
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
