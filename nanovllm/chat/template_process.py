"""Renders chat templates in a separate process, with limits on time, memory and output.

A template is a program that comes with a checkpoint. Jinja's sandbox keeps it from files and from
Python's internals, but not from endless loops, `'a' * 10**10` or a comparison of nested lists that
takes years, and no thread can interrupt such an operation. A process can be ended at any place.

This file is the program of that process, too. So it imports only the standard library at its top.
"""

import contextlib
import datetime
import functools
import json
import os
import threading
import weakref
from collections.abc import Mapping
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    import subprocess

    from jinja2 import Environment, Template

    from nanovllm.utils.limited_process import Limits

MAX_SECONDS = 1.0  # processor time of one rendering. Time of other processes does not count.
MAX_BYTES = 256 * 2**20  # memory of the process, in addition to what Python and Jinja take
MAX_CHARS = 2**24  # length of the rendered text


class TemplateError(Exception):
    """A template is invalid, raised an error, or reached a limit."""


class TemplateLimitError(TemplateError):
    """A template reached a limit, which ended its process."""


class TemplateProcess:
    """Renders templates in a process that is started when first needed; one at a time.

    A template that reaches MAX_SECONDS or MAX_BYTES ends the process; the next gets a new one.
    """

    def __init__(self) -> None:
        self._owner = os.getpid()
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._finalizer: weakref.finalize[..., Any] | None = None
        from nanovllm.utils.process import call_in_forked  # the process itself does without

        call_in_forked(self._let_go)

    def _let_go(self) -> None:
        """Give up the pipes of a forked process. The process would live as long as that does."""
        if self._process is not None:
            null = os.open(os.devnull, os.O_RDWR)
            for pipe in (self._process.stdin, self._process.stdout):
                assert pipe is not None
                os.dup2(null, pipe.fileno(), inheritable=False)  # what is buffered goes nowhere
            os.close(null)

    def render(self, template: str, variables: Mapping[str, Any]) -> str:
        """Return the text that a template makes of variables, which hold JSON values.

        Raises:
            TemplateError: the template is invalid, raised an error, or reached a limit; or this
                process was forked from the one that made this object.
            TypeError, ValueError, RecursionError: the variables are not JSON values.
        """
        if os.getpid() != self._owner:
            raise TemplateError("this process was forked after the model was loaded")
        request = _encode([template, variables])
        with self._lock:
            reply: dict[str, str] = json.loads(self._exchange(request))
        if "error" in reply:
            raise TemplateError(reply["error"])
        return reply["text"]

    def shutdown(self) -> None:
        """End the process. A later rendering starts a new one. A forked process changes nothing."""
        if os.getpid() == self._owner:
            with self._lock:
                self._stop()

    def _exchange(self, request: bytes) -> str:
        from nanovllm.utils.limited_process import Watch

        process = self._running()
        assert process.stdin is not None  # both are pipes
        assert process.stdout is not None
        reply = b""
        try:
            with Watch(process, MAX_SECONDS, MAX_BYTES) as watch, contextlib.suppress(OSError):
                process.stdin.write(request)
                process.stdin.flush()
                reply = process.stdout.readline()
        except BaseException:  # Ctrl-C: its reply would be taken for that to the next request
            self._stop()
            raise
        if not reply.endswith(b"\n"):
            status = self._stop()
            raise TemplateLimitError(_cause(watch.reached(status), status))
        return reply.decode("utf-8", "surrogatepass")

    def _running(self) -> "subprocess.Popen[bytes]":
        """Return the process; start one if there is none, or if it has ended."""
        if self._process is not None and self._process.poll() is None:
            return self._process
        self._stop()
        from nanovllm.utils.limited_process import start

        try:
            self._process = start(__file__)
        except OSError as error:
            raise TemplateError(f"cannot start a process for it: {error}") from error
        self._finalizer = weakref.finalize(self, _end, self._process, self._owner)
        return self._process

    def _stop(self) -> int | None:
        """End the process and return its exit status; None if there is none."""
        self._process = None
        return self._finalizer() if self._finalizer is not None else None


def _end(process: "subprocess.Popen[bytes]", owner: int) -> int | None:
    if os.getpid() == owner:  # a forked process would wait for what is not its child
        process.kill()
        process.communicate()
    return process.returncode


def _cause(limit: str, exit_status: int | None) -> str:
    """Return why the process has ended in the middle of a rendering."""
    if limit == "time":
        return f"it takes more than {MAX_SECONDS:g} s of processor time"
    if limit == "memory":
        return f"it takes more than {MAX_BYTES >> 20} MiB of memory"
    return f"its process ended with status {exit_status}"


def _encode(value: Any) -> bytes:
    """Return a line of JSON. Lone surrogates pass: the caller of `render` looks for them."""
    text = json.dumps(value, ensure_ascii=False, default=plain_value)
    return text.encode("utf-8", "surrogatepass") + b"\n"


def plain_value(value: Any) -> Any:
    """Return a mapping or a pydantic object as a dictionary."""
    if isinstance(value, Mapping):
        return dict(value)
    if hasattr(value, "model_dump"):
        return value.model_dump()
    raise TypeError(f"{type(value).__name__} is not a JSON value")


# From here on: what runs in the process.


def main(limits: "Limits", requests: IO[bytes], replies: IO[bytes]) -> None:
    """Answer each line of `requests` with a line of `replies`, until there are no more."""
    _environment()  # import everything before memory is limited
    limits.memory(MAX_BYTES)
    for request in requests:
        try:
            template, variables = json.loads(request.decode("utf-8", "surrogatepass"))
            with limits.time(MAX_SECONDS):
                reply = {"text": _render(template, variables)}
        except MemoryError:
            limits.out_of_memory()
        except RecursionError:
            reply = {"error": "it is nested too deeply, or calls itself without end"}
        except Exception as error:  # a template may raise any exception
            reply = {"error": f"{error}"[:300] or type(error).__name__}
        replies.write(_encode(reply))
        replies.flush()


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
