"""`nanovllm chat`: a conversation of lines read and answers written, and its commands.

The answers are a model's or a server's.
"""

import contextlib
import json
import mimetypes
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from nanovllm.chat.pictures import file_part, with_files
from nanovllm.errors import InvalidRequestError, ServerError
from nanovllm.options.sampling_params import SamplingParams
from nanovllm.options.validation import did_you_mean, shown
from nanovllm.outputs import RequestOutput
from nanovllm.utils.terminal import (
    complain,
    is_interactive,
    noted_interrupts,
    path_completions,
    spinner,
    write,
    write_stream,
)

if TYPE_CHECKING:
    from nanovllm.llm import LLM


class AnswerPiece(NamedTuple):
    """A part of an answer."""

    text: str
    """It may be empty."""
    num_tokens: int = 0
    """How many tokens are new."""


Message = dict[str, Any]
Source = Callable[[list[Message]], Iterator[AnswerPiece]]
"""Answers a conversation, piece by piece. It raises InvalidRequestError or ServerError, or
KeyboardInterrupt at the first Ctrl-C, and ends the answer when the iterator is closed."""

HELP = {
    "/help": "shows this list",
    "/system TEXT": "sets the system message; without TEXT there is none",
    "/image FILE": "adds a picture to the next message, as does its path alone in a line",
    "/regen": "answers the last message again",
    "/save FILE": "writes the conversation to a new file, as JSON",
    "/reset": "starts a new conversation; the system message stays",
    "/clear": "does the same as /reset",
    "/exit": "quits, as Ctrl-D does",
    '"""': "begins a message of several lines, and ends it; or end lines with \\",
    "Ctrl-C": "stops an answer, or clears the line",
}
"""What can be typed besides messages."""


_LEAST_SECONDS = 0.01
"""The shortest time for which a speed is shown."""


class Chat:
    """One conversation, with a system message if `system` is one."""

    def __init__(self, source: Source, system: str | None) -> None:
        self._source = source
        self._system = system
        self._turns: list[Message] = []
        self._pictures: list[str] = []  # files for the next message
        self._commands: dict[str, Callable[[str], None]] = {
            "/help": self._show_help,
            "/system": self._set_system,
            "/image": self.add_picture,
            "/regen": self._answer_again,
            "/save": self._save,
            "/reset": self._reset,
            "/clear": self._reset,
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
                elif (file := dropped_picture(text)) is not None:
                    self.add_picture(file)
                elif text:
                    self.answer(text)
            except (InvalidRequestError, ServerError) as error:
                complain(str(error))

    def completions(self, line: str) -> list[str]:
        """Return what the last word of a line may become: a command, or a file of /save, /image."""
        command, space, rest = line.partition(" ")
        if not space:
            names = [*self._commands, "/exit"] if line.startswith("/") else []
            return [name for name in names if name.startswith(line)]
        return path_completions(rest) if command in ("/save", "/image") else []

    def _obey(self, name: str, argument: str = "") -> None:
        if argument and name in HELP:
            raise InvalidRequestError(f"{name} takes no argument, got {shown(argument)}")
        command = self._commands.get(name)
        if command is None:
            hint = did_you_mean(name, [*self._commands, "/exit"])
            if name == "/set":
                hint = ": flags at the start set parameters, such as --temperature 0.5"
            raise InvalidRequestError(f"there is no command {name:.80}{hint}")
        command(argument)

    def add_picture(self, file: str) -> None:
        """Add a picture to the next message; raise InvalidRequestError if it cannot be read."""
        if not file:
            raise InvalidRequestError("/image needs the name of a file, such as /image cat.png")
        file_part(file)
        self._pictures.append(file)
        _tell(f"(The next message is about {shown(file)}.)")

    def answer(self, text: str) -> None:
        """Write the answer and keep the turn; keep nothing of it if Ctrl-C stops the answer."""
        question = {"role": "user", "content": with_files(text, self._pictures)}
        self._answer(self._turns, question)

    def _answer(self, earlier: list[Message], question: Message) -> None:
        messages = [*self._messages(earlier), question]
        timer = _Timer()
        try:
            answer = write_stream(timer.timed(awaited(self._source(messages))))
        except KeyboardInterrupt:
            _tell("(Stopped. The conversation goes on without this question.)")
            return
        except InvalidRequestError as error:
            raise InvalidRequestError(f"{error} (/reset starts a new conversation)") from None
        self._turns = [*earlier, question, {"role": "assistant", "content": answer}]
        self._pictures = []
        if speed := timer.speed():
            _tell(f"({speed})")

    def _answer_again(self, _: str) -> None:
        """Answer the last question again; if that fails or is stopped, its answer stays."""
        if not self._turns:
            raise InvalidRequestError("there is no message yet to answer again")
        *earlier, question, _answer = self._turns
        self._answer(earlier, question)

    def _messages(self, turns: list[Message]) -> list[Message]:
        system = [{"role": "system", "content": self._system}] if self._system else []
        return system + turns

    def _show_help(self, _: str) -> None:
        write("".join(f"{name:<17}{meaning}\n" for name, meaning in HELP.items()))

    def _set_system(self, text: str) -> None:
        self._system = text
        _tell("(The system message is set.)" if text else "(There is no system message now.)")

    def _save(self, path: str) -> None:
        if not path:
            raise InvalidRequestError("/save needs the name of a file, such as /save chat.json")
        try:
            with Path(path).expanduser().open("x", encoding="utf-8") as file:
                json.dump(self._messages(self._turns), file, ensure_ascii=False, indent=2)
                file.write("\n")
        except FileExistsError:
            raise InvalidRequestError(f"{shown(path)} exists already; give another name") from None
        except (OSError, RuntimeError, ValueError) as error:  # no home of "~", a NUL in the name
            raise InvalidRequestError(f"cannot write {shown(path)}: {error}") from None
        _tell(f"(Saved {len(self._turns)} messages.)")

    def _reset(self, _: str) -> None:
        self._turns = []
        self._pictures = []
        _tell("(A new conversation.)")


def dropped_picture(line: str) -> str | None:
    """Return the file that a line names and nothing else, as terminals write one that is dropped
    there: in quotes, or with a backslash before each space. None: it names no picture.
    """
    names = [line, line.strip("'\""), line.replace("\\ ", " ")]
    for name in names:
        is_kind = (mimetypes.guess_type(name)[0] or "").startswith("image/")
        with contextlib.suppress(OSError, RuntimeError, ValueError):
            if is_kind and Path(name).expanduser().is_file():
                return name
    return None


class _Timer:
    """Counts the tokens of an answer and the seconds that they take."""

    def __init__(self) -> None:
        self._start = time.monotonic()
        self._times: list[float] = []
        self._counts: list[int] = []

    def timed(self, pieces: Iterator[AnswerPiece]) -> Iterator[str]:
        """Yield the texts of an answer, and note when its tokens come."""
        for piece in pieces:
            self._times.append(time.monotonic())
            self._counts.append(piece.num_tokens)
            yield piece.text

    def speed(self) -> str:
        """Return tokens, seconds to the first text, and tokens a second after it."""
        number = sum(self._counts)
        if not number:
            return ""
        first = self._times[0]
        found = f"{number} token{'s' * (number != 1)}, the first after {first - self._start:.1f} s"
        # A server tells the number at the end only; one token at least came with the first text.
        seconds = self._times[-1] - first
        further = number - max(self._counts[0], 1)
        if further < 1 or seconds < _LEAST_SECONDS:
            return found
        return f"{found}, {further / seconds:.0f} tokens/s"


def _tell(message: str) -> None:
    """Say at a terminal what happened; a script reads only answers."""
    if is_interactive():
        write(f"{message}\n")


def model_source(llm: "LLM", params: SamplingParams, template: Mapping[str, Any]) -> Source:
    """Return the answers of a model; `template` are arguments of the chat template."""

    def answer(messages: list[Message]) -> Iterator[AnswerPiece]:
        options = {"add_generation_prompt": True, **template}
        prompt = llm.engine.input_processor.render(messages, options)
        with noted_interrupts() as interrupted:
            for piece in pieces(llm.stream(prompt, params)):
                if interrupted():
                    raise KeyboardInterrupt
                yield piece

    return answer


def pieces(outputs: Iterator[RequestOutput]) -> Iterator[AnswerPiece]:
    """Yield the pieces of a stream.

    Raises:
        InvalidRequestError: the model failed, such as with logits that are not numbers.
    """
    for output in outputs:
        yield AnswerPiece(output.text, len(output.token_ids))
        if output.finish_reason == "error":
            reason = output.outputs[0].stop_reason
            raise InvalidRequestError(f"the answer ended with an error: {reason}")


def awaited(found: Iterator[AnswerPiece]) -> Iterator[AnswerPiece]:
    """Yield pieces of an answer, with a spinner before the first text."""
    waited = 0
    first = AnswerPiece("")
    with spinner():
        for piece in found:
            if piece.text:
                first = piece
                break
            waited += piece.num_tokens
    yield AnswerPiece(first.text, first.num_tokens + waited)
    yield from found
