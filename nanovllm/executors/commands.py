"""Commands: what all ranks call on their runners between two steps, with results for the engine.

Knows no command by name: a branch sends functions of its own.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from nanovllm.errors import NanoVLLMError
from nanovllm.worker.model_runner import ModelRunner


class Command(NamedTuple):
    """A call of a function on each rank's runner, in the order of the steps around it."""

    command_id: int
    function: Callable[..., Any]
    """A function of a module, because its name is what is sent to other processes. It gets the
    runner, then `arguments`."""
    arguments: tuple[Any, ...]


class CommandResult(NamedTuple):
    """What one rank's call returned or raised."""

    command_id: int
    value: Any = None
    error: NanoVLLMError | None = None


def run_command(runner: ModelRunner, command: Command) -> CommandResult:
    """Call the function and return what it returns, or the mistake of the user that it found.

    Raises:
        Exception: anything else. The rank then ends, as after a step that failed.
    """
    try:
        with torch.inference_mode():
            return CommandResult(command.command_id, command.function(runner, *command.arguments))
    except NanoVLLMError as error:
        if type(error) is NanoVLLMError:  # it wraps a crash
            raise
        return CommandResult(command.command_id, error=error)


def values_of(results: list[CommandResult]) -> list[Any]:
    """Return what the ranks returned, in their order.

    Raises:
        NanoVLLMError: the mistake of the user that a rank found.
    """
    for result in results:
        if result.error is not None:
            raise result.error
    return [result.value for result in results]
