"""The exceptions that nanovllm raises for its users, all subclasses of `NanoVLLMError`.

Each message gives the value, the rule that it broke and the remedy. A broken internal invariant
is an AssertionError instead.
"""

import errno
import logging


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
    """A plugin, a class of the user's that an option names, raised an exception.
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


class TransferError(NanoVLLMError, RuntimeError):
    """New weights did not get from a trainer to an engine."""


class ServerError(NanoVLLMError, RuntimeError):
    """A server cannot be reached, refuses, or breaks off: `nanovllm chat --url`."""


def refuses_memory(error: BaseException) -> bool:
    """Return whether Python, torch or a system call was refused memory, on the host or a GPU."""
    if isinstance(error, OutOfMemoryError | MemoryError):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    # torch, which is not imported here, has a class for a GPU and none for a CPU.
    is_gpu = type(error).__name__ == "OutOfMemoryError"
    return is_gpu or "DefaultCPUAllocator: can't allocate" in str(error)


def log_failure(logger: logging.Logger, error: BaseException, what: str) -> None:
    """Log that `what` failed: an error whose message says all that a user needs in one line; any
    other, which is a fault of ours or of a plugin, with its traceback.
    """
    if isinstance(error, NanoVLLMError) and not isinstance(error, PluginError):
        logger.error("%s: %s", what, error)
    else:
        logger.error("%s", what, exc_info=error)
