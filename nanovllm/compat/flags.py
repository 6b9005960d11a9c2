"""Flags as vLLM's users type them: short, or of options that are not here.

Knows no command. docs/migrating.md shows the tables of names.
"""

import argparse
import json
import re
from collections.abc import Sequence as Seq
from typing import Any

from nanovllm.compat.other_names import CONFIG_NAMES
from nanovllm.options.validation import OtherName, other_names, shown

SHORT_FLAGS = {"tensor_parallel_size": "-tp", "quantization": "-q"}
"""By field of Config: vLLM's short flag."""

_ALWAYS = "it is always so; leave it out"
_TLS = "put a proxy with TLS before the server"
_OWN_LOG = "each request is logged in one line, without its text, and probes are not; leave it out"

SERVE_NAMES = other_names(
    ("enable_auto_tool_choice enable_prompt_tokens_details", (True,), _ALWAYS),
    ("disable_fastapi_docs", (True,), _ALWAYS),
    ("disable_uvicorn_access_log", (True, False), _OWN_LOG),
    ("uvicorn_log_level", ("info",), "use log_level"),
    ("log_config_file", (), "use log_config"),
    ("max_log_len disable_access_log_for_endpoints", (), _OWN_LOG),
    ("chat_template_content_format", ("auto", "string"), "content is joined to a string"),
    ("trust_request_chat_template", (False,), "templates are not taken from requests"),
    ("response_role", ("assistant",), "answers are the assistant's"),
    ("return_tokens_as_token_ids", (False,), "use the request's field return_token_ids"),
    ("tool_parser_plugin", ("",), "use tool_call_parser, or leave it out"),
    ("allowed_origins", (), "use cors_origins"),
    ("allowed_methods allowed_headers", (["*"],), "all are allowed where cors_origins allows"),
    ("allow_credentials", (False,), "use an API key"),
    ("ssl_keyfile ssl_certfile ssl_ca_certs", (), _TLS),
    ("middleware", (), "put a proxy before the server"),
    ("api_server_count", (1,), "one process serves; leave it out"),
    ("headless", (False,), "one process serves; leave it out"),
)
"""Names of vLLM's options of its server."""


def add_other_flags(
    group: "argparse._ActionsContainer", *, default: Any, is_server: bool = False
) -> None:
    """Add a flag for each of vLLM's names that has none yet, and the short flags; helps hide them.

    A flag that asks for what happens anyway is taken; any other ends with an error that says what
    to use.

    Args:
        default: the value in the namespace where the flag is not given.
        is_server: whether the names of vLLM's server are flags too.
    """
    names = {**CONFIG_NAMES, **SERVE_NAMES} if is_server else CONFIG_NAMES
    known = group._option_string_actions
    for field, short in SHORT_FLAGS.items():
        if (action := known.get(_flag(field))) and short not in known:
            known[short] = action
    for name, other in names.items():
        flags = [_flag(name)]
        if any(isinstance(value, bool) for value in other.accepted):
            flags.append(_flag(f"no_{name}"))
        if known.keys().isdisjoint(flags):
            group.add_argument(
                *flags,
                action=_OtherFlag,
                other=other,
                nargs=0 if len(flags) == 2 else None,
                dest=name,
                default=default,
                help=argparse.SUPPRESS,
            )


class _OtherFlag(argparse.Action):
    """Checks the value of a flag of vLLM's."""

    def __init__(self, *args: Any, other: OtherName, **options: Any) -> None:
        super().__init__(*args, **options)
        self._other = other

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Seq[Any] | None,
        option_string: str | None = None,
    ) -> None:
        flag = option_string or self.option_strings[0]
        value = _value(values) if isinstance(values, str) else flag == self.option_strings[0]
        if not self._other.accepts(value):
            given = f"{flag} {shown(values)[1:-1]}" if isinstance(values, str) else flag
            advice = _with_flags(self._other.advice, parser)
            parser.error(f"{given} is not supported: {advice}")
        setattr(namespace, self.dest, value)


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _value(text: str) -> Any:
    """Return the JSON value of a flag's text, or else the text."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None if text == "None" else text


def _with_flags(advice: str, parser: argparse.ArgumentParser) -> str:
    """Return advice that names fields, with the flags of those fields."""
    fields = {action.dest for action in parser._actions if action.help != argparse.SUPPRESS}
    return re.sub(
        r"\b([a-z]+_[a-z_]+)(=True)?",
        lambda found: _flag(found[1]) if found[1] in fields else found[0],
        advice,
    )
