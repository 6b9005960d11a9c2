"""The exceptions that nanovllm raises for its users, all subclasses of `NanoVLLMError`.

Each message gives the value, the rule that it broke and the remedy. A broken internal invariant
is an AssertionError instead.
"""

import collections.abc
import typing

Parameters = typing.ParamSpec("Parameters")
Result = typing.TypeVar("Result")


class NanoVLLMError(Exception):
    """Base class of every exception that nanovllm raises on purpose."""


class ConfigError(NanoVLLMError, ValueError):
    """An engine option is unknown, of the wrong type, out of range, or contradicts another."""


class InvalidRequestError(NanoVLLMError, ValueError):
    """A prompt or a sampling parameter is invalid or unsupported; the engine continues to work."""


class PromptTooLongError(InvalidRequestError):
    """A prompt and one token of output do not fit `max_model_len`."""


class CheckpointError(NanoVLLMError, ValueError):
    """A model cannot be found or read, or its weights do not match its architecture."""


class UnsupportedModelError(CheckpointError):
    """The checkpoint is valid, but needs a feature that is not implemented."""


class OutOfMemoryError(NanoVLLMError, RuntimeError):
    """The system refuses memory that the engine needs at its start or in a step, or the KV pool
    cannot hold even one sequence of `max_model_len` tokens.

    After a step's error the engine continues to work: free memory and try again.
    """


class EngineDeadError(NanoVLLMError, RuntimeError):
    """The engine has ended: a worker process died, a class of the user's failed, or `shutdown` was
    called. Make a new `LLM` to continue.
    """


class PluginError(EngineDeadError):
    """A plugin, a class of the user's that an option names, raised an exception or broke a rule.
    This ends the engine, whose pages and queue are unknown then.
    """

    @classmethod
    def of(cls, plugin: str, fault: str) -> "PluginError":
        """Return the error.

        Args:
            plugin: the option and the class, `scheduling_policy="module:Class"`.
            fault: what happened, and the rule.
        """
        return cls(f"{plugin}: {fault}; the engine has ended: mend it and make a new LLM")

    @classmethod
    def guard(
        cls,
        plugin: str,
        name: str,
        method: collections.abc.Callable[Parameters, Result],
        *args: Parameters.args,
        **keywords: Parameters.kwargs,
    ) -> Result:
        """Return what a method of the user's class returns; raise the error if it raises anything.

        Args:
            plugin: as for `of`.
            name: the call for the message, such as "take()".
        """
        try:
            return method(*args, **keywords)
        except cls:  # of another plugin, which this one called
            raise
        except Exception as error:
            raise cls.of(plugin, f"{name} raised {type(error).__name__}: {error}") from error


class TransferError(NanoVLLMError, RuntimeError):
    """New weights did not get from a trainer to an engine."""


class ServerError(NanoVLLMError, RuntimeError):
    """A server cannot be reached, refuses, or breaks off: `nanovllm chat --url`."""
