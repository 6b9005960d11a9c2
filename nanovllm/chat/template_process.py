"""Renders chat templates in a separate process, with limits on time, memory and output.

A template is a program that comes with a checkpoint. Jinja's sandbox keeps it from files and from
Python's internals, but not from endless loops, `'a' * 10**10` or a comparison of nested lists that
takes years, and no thread can interrupt such an operation. A process can be ended at any place.

This file is the program of that process, too. So it imports only the standard library at its top.
"""

import datetime
import functools
import json
from collections.abc import Mapping
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jinja2 import Environment, Template

    from nanovllm.utils.limited_process import Limits

MAX_SECONDS = 1.0  # processor time of one rendering. Time of other processes does not count.
MAX_BYTES = 256 * 2**20  # memory of the process, in addition to what Python and Jinja take
MAX_CHARS = 2**24  # length of the rendered text


class TemplateError(Exception):
    """A template is invalid, raised an error, or reached a limit, which ended its process."""


class TemplateRefusalError(TemplateError):
    """A template is invalid or raised an error: it may take another form of the conversation."""


class TemplateProcess:
    """Renders templates in a process that is started when first needed; one at a time.

    A template that reaches MAX_SECONDS or MAX_BYTES ends the process; the next gets a new one.
    """

    def __init__(self) -> None:
        from nanovllm.utils.limited_process import LimitedProcess  # the process does without

        self._process = LimitedProcess(__file__, MAX_SECONDS, MAX_BYTES)

    def render(self, template: str, variables: Mapping[str, Any]) -> str:
        """Return the text that a template makes of variables, which hold JSON values.

        Raises:
            TemplateRefusalError: the template is invalid, or raised an error.
            TemplateError: it reached a limit; or this process was forked from the one that made
                this object.
            TypeError, ValueError, RecursionError: the variables are not JSON values.
        """
        from nanovllm.utils.limited_process import LimitError

        request = _encode([template, variables])
        try:
            reply = json.loads(self._process.ask(request).decode("utf-8", "surrogatepass"))
        except LimitError as error:
            raise TemplateError(f"{error}") from error
        if "error" in reply:
            raise TemplateRefusalError(reply["error"])
        text: str = reply["text"]
        return text

    def shutdown(self) -> None:
        """End the process. A later rendering starts a new one. A forked process changes nothing."""
        self._process.shutdown()


def _encode(value: Any) -> bytes:
    """Return JSON. Lone surrogates pass: the caller of `render` looks for them."""
    text = json.dumps(value, ensure_ascii=False, default=plain_value)
    return text.encode("utf-8", "surrogatepass")


def plain_value(value: Any) -> Any:
    """Return a mapping or a pydantic object as a dictionary."""
    if isinstance(value, Mapping):
        return dict(value)
    if hasattr(value, "model_dump"):
        return value.model_dump()
    raise TypeError(f"{type(value).__name__} is not a JSON value")


# From here on: what runs in the process.


def main(limits: "Limits", requests: IO[bytes], replies: IO[bytes]) -> None:
    """Answer requests until there are no more."""
    _environment()  # import everything before memory is limited
    limits.memory(MAX_BYTES)
    limits.serve(requests, replies, MAX_SECONDS, _answer)


def _answer(request: bytes) -> bytes:
    try:
        template, variables = json.loads(request.decode("utf-8", "surrogatepass"))
        return _encode({"text": _render(template, variables)})
    except MemoryError:
        raise
    except RecursionError:
        return _encode({"error": "it is nested too deeply, or calls itself without end"})
    except Exception as error:  # a template may raise any exception
        return _encode({"error": f"{error}"[:300] or type(error).__name__})


def _render(template: str, variables: dict[str, Any]) -> str:
    pieces = []
    num_chars = 0
    for piece in _compile(template).generate(variables):
        num_chars += len(piece)
        if num_chars > MAX_CHARS:
            raise TemplateError(f"its text is longer than {MAX_CHARS} characters")
        pieces.append(piece)
    return "".join(pieces)


@functools.lru_cache(maxsize=8)
def _compile(template: str) -> "Template":
    return _environment().from_string(template)


@functools.cache
def _environment() -> "Environment":
    """Return what templates run in, with the names that transformers gives them."""
    from jinja2 import TemplateError as JinjaError, ext, nodes, parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(ext.Extension):
        """{% generation %}, which marks what to train on, renders what it holds."""

        tags = {"generation"}  # noqa: RUF012 (Jinja's own type)

        def parse(self, parser: parser.Parser) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body, lineno=line)

    def raise_exception(message: str) -> None:
        raise JinjaError(message)

    def tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, ext.loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment
