"""The exceptions a user of nanovllm can meet, all below `NanoVLLMError`.

Each message names the value, the rule it broke and what to do about it. Broken invariants of our
own are assertions, not members of this hierarchy.
"""


class NanoVLLMError(Exception):
    """Base of every exception that nanovllm raises on purpose."""


class ConfigError(NanoVLLMError, ValueError):
    """An engine option is unknown, of the wrong type, out of range or impossible together with
    another.
    """


class InvalidRequestError(NanoVLLMError, ValueError):
    """A prompt or a sampling parameter cannot be served; the engine is unchanged and goes on
    working.
    """


class CheckpointError(NanoVLLMError, ValueError):
    """A model cannot be found, read or matched with its architecture."""


class UnsupportedModelError(CheckpointError):
    """The checkpoint is sound but asks for something that is not implemented."""


class OutOfMemoryError(NanoVLLMError, RuntimeError):
    """The KV cache pool cannot hold even one sequence of `max_model_len` tokens."""


class EngineDeadError(NanoVLLMError, RuntimeError):
    """A worker process died or the engine was shut down; make a new `LLM` to go on."""
