"""`nanovllm chat`: a conversation of lines read and answers written, and its commands.

Knows no flags and no terminal: `cli` loads the model, `terminal` reads and writes.
"""

import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanovllm.errors import InvalidRequestError
from nanovllm.outputs import RequestOutput
from nanovllm.sampling_params import SamplingParams
from nanovllm.terminal import (
    complain,
    is_interactive,
    noted_interrupts,
    spinner,
    write,
    write_stream,
)
from nanovllm.validation import did_you_mean, shown

if TYPE_CHECKING:
    from nanovllm.llm import LLM

HELP = {
    "/help": "shows this list",
    "/system TEXT": "sets the system message; without TEXT there is none",
    "/save FILE": "writes the conversation to a new file, as JSON",
    "/reset": "starts a new conversation; the system message stays",
    "/exit": "quits, as Ctrl-D does",
    "Ctrl-C": "stops an answer, or clears the line",
}
"""What can be typed beside messages."""


class Chat:
    """One conversation with a model.

    Args:
        system: the system message; None or "" for none.
        template: arguments of the chat template.
    """

    def __init__(
        self, llm: "LLM", params: SamplingParams, system: str | None, template: Mapping[str, Any]
    ) -> None:
        self._llm = llm
        self._params = params
        self._system = system
        self._template = template
        self._turns: list[dict[str, str]] = []
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
            except InvalidRequestError as error:
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
                prompt = self._llm.render(messages, add_generation_prompt=True, **self._template)
                outputs = self._llm.stream(prompt, self._params)
                answer = write_stream(texts(outputs, interrupted))
                stopped = interrupted()
        except KeyboardInterrupt:
            stopped = True
        except InvalidRequestError as error:
            raise InvalidRequestError(f"{error} (/reset starts a new conversation)") from None
        if stopped:
            _tell("(Stopped. The conversation goes on without this question.)")
        else:
            self._turns += [question, {"role": "assistant", "content": answer}]

    def _messages(self) -> list[dict[str, str]]:
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


def texts(
    outputs: Iterator[RequestOutput], interrupted: Callable[[], bool] = lambda: False
) -> Iterator[str]:
    """Yield the text of each output of a stream until Ctrl-C comes.

    Raises:
        InvalidRequestError: the model failed, such as with logits that are not numbers.
    """
    with spinner():
        first = list(itertools.islice(outputs, 1))
    for output in itertools.chain(first, outputs):
        if interrupted():
            return
        yield output.text
        if output.finish_reason == "error":
            reason = output.outputs[0].stop_reason
            raise InvalidRequestError(f"the answer ended with an error: {reason}")


def _tell(message: str) -> None:
    """Say at a terminal what happened; a script reads only answers."""
    if is_interactive():
        write(f"{message}\n")
