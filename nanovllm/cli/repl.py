"""`nanovllm chat`: a conversation of lines read and answers written, and its commands.

The answers are a model's or a server's. Knows no flags and no terminal: `cli` loads the model,
`terminal` reads and writes.
"""

import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanovllm.errors import InvalidRequestError, ServerError
from nanovllm.options.sampling_params import SamplingParams
from nanovllm.options.validation import did_you_mean, shown
from nanovllm.outputs import RequestOutput
from nanovllm.utils.terminal import (
    complain,
    is_interactive,
    noted_interrupts,
    spinner,
    write,
    write_stream,
)

if TYPE_CHECKING:
    from nanovllm.llm import LLM
    from nanovllm.loadtest.sse_client import Server

HELP = {
    "/help": "shows this list",
    "/system TEXT": "sets the system message; without TEXT there is none",
    "/save FILE": "writes the conversation to a new file, as JSON",
    "/reset": "starts a new conversation; the system message stays",
    "/exit": "quits, as Ctrl-D does",
    "Ctrl-C": "stops an answer, or clears the line",
}
"""What can be typed beside messages."""

Message = dict[str, str]
Source = Callable[[list[Message]], Iterator[str]]
"""Answers a conversation, piece by piece; a piece may be empty. It raises InvalidRequestError or
ServerError, and ends the answer when the iterator is closed."""

THINK, END_THINK = "<think>\n", "\n</think>\n\n"
"""What stands around a server's reasoning in an answer, as models themselves write it."""


class Chat:
    """One conversation, with a system message if `system` is one."""

    def __init__(self, source: Source, system: str | None) -> None:
        self._source = source
        self._system = system
        self._turns: list[Message] = []
        self._commands: dict[str, Callable[[str], None]] = {
            "/help": self._show_help,
            "/system": self._set_system,
            "/save": self._save,
            "/reset": self._reset,
        }

    def run(self, lines: Iterable[str]) -> None:
        """Answer messages and obey commands until the lines end or /exit comes."""
        for line in lines:
            text = line.strip()
            if text == "/exit":
                return
            try:
                if re.match(r"/\w+(\s|$)", text):  # not a path such as /etc/hosts
                    self._obey(*text.split(None, 1))
                elif text:
                    self._answer(text)
            except (InvalidRequestError, ServerError) as error:
                complain(str(error))

    def _obey(self, name: str, argument: str = "") -> None:
        if argument and name in HELP:
            raise InvalidRequestError(f"{name} takes no argument, got {shown(argument)}")
        command = self._commands.get(name)
        if command is None:
            hint = did_you_mean(name, [*self._commands, "/exit"])
            raise InvalidRequestError(f"there is no command {name:.80}{hint}")
        command(argument)

    def _answer(self, text: str) -> None:
        """Write the answer and keep the turn; keep nothing of it if Ctrl-C stops the answer."""
        question = {"role": "user", "content": text}
        messages = [*self._messages(), question]
        try:
            with noted_interrupts() as interrupted:
                answer = write_stream(awaited(self._source(messages), interrupted))
                stopped = interrupted()
        except KeyboardInterrupt:
            stopped = True
        except InvalidRequestError as error:
            raise InvalidRequestError(f"{error} (/reset starts a new conversation)") from None
        if stopped:
            _tell("(Stopped. The conversation goes on without this question.)")
        else:
            self._turns += [question, {"role": "assistant", "content": answer}]

    def _messages(self) -> list[Message]:
        system = [{"role": "system", "content": self._system}] if self._system else []
        return system + self._turns

    def _show_help(self, _: str) -> None:
        write("".join(f"{name:<14}{meaning}\n" for name, meaning in HELP.items()))

    def _set_system(self, text: str) -> None:
        self._system = text
        _tell("(The system message is set.)" if text else "(There is no system message now.)")

    def _save(self, path: str) -> None:
        if not path:
            raise InvalidRequestError("/save needs the name of a file, such as /save chat.json")
        try:
            with Path(path).expanduser().open("x", encoding="utf-8") as file:
                json.dump(self._messages(), file, ensure_ascii=False, indent=2)
                file.write("\n")
        except FileExistsError:
            raise InvalidRequestError(f"{shown(path)} exists already; give another name") from None
        except (OSError, RuntimeError, ValueError) as error:  # no home of "~", a NUL in the name
            raise InvalidRequestError(f"cannot write {shown(path)}: {error}") from None
        _tell(f"(Saved {len(self._turns)} messages.)")

    def _reset(self, _: str) -> None:
        self._turns = []
        _tell("(A new conversation.)")


def model_source(llm: "LLM", params: SamplingParams, template: Mapping[str, Any]) -> Source:
    """Return the answers of a model; `template` are arguments of the chat template."""

    def answer(messages: list[Message]) -> Iterator[str]:
        prompt = llm.render(messages, add_generation_prompt=True, **template)
        yield from texts(llm.stream(prompt, params))

    return answer


def server_source(server: "Server", model: str, fields: Mapping[str, Any]) -> Source:
    """Return the answers of a server's model; `fields` are further ones of each request."""
    from nanovllm.loadtest import sse_client

    def answer(messages: list[Message]) -> Iterator[str]:
        sent = [{**message, "content": _without_reasoning(message)} for message in messages]
        body = {**fields, "model": model, "messages": sent, "stream": True}
        reasons = False
        reason = None
        for data in sse_client.stream(server, "/v1/chat/completions", body):
            event = {} if data in (None, "[DONE]") else sse_client.parse_event(data or "")
            choices = sse_client.choices_of(event)
            text, thought, end, _ = choices[0] if choices else ("", "", None, None)
            reason = end or reason
            yield THINK * (bool(thought) and not reasons) + thought
            reasons = reasons or bool(thought)
            yield END_THINK * (bool(text) and reasons) + text
            reasons = reasons and not text
        if reason in (None, "error", "abort"):
            raise ServerError(f"the server broke off its answer: {reason or 'no reason is given'}")

    return answer


def texts(outputs: Iterator[RequestOutput]) -> Iterator[str]:
    """Yield the text of each output of a stream.

    Raises:
        InvalidRequestError: the model failed, such as with logits that are not numbers.
    """
    for output in outputs:
        yield output.text
        if output.finish_reason == "error":
            reason = output.outputs[0].stop_reason
            raise InvalidRequestError(f"the answer ended with an error: {reason}")


def awaited(
    pieces: Iterator[str], interrupted: Callable[[], bool] = lambda: False
) -> Iterator[str]:
    """Yield pieces of text until Ctrl-C comes, with a spinner before the first."""
    with spinner():
        first = next((piece for piece in pieces if piece or interrupted()), "")
    for piece in itertools.chain([first], pieces):
        if interrupted():
            return
        yield piece


def _without_reasoning(message: Message) -> str:
    """Return a message's content without the reasoning that an answer begins with."""
    text = message["content"]
    reasons = message["role"] == "assistant" and text.startswith(THINK)
    return text.partition(END_THINK)[2] if reasons else text


def _tell(message: str) -> None:
    """Say at a terminal what happened; a script reads only answers."""
    if is_interactive():
        write(f"{message}\n")
