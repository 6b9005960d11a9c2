"""What a request asks of generation: frozen and validated. Knows nothing of how it is carried
out.
"""

import dataclasses
from typing import ClassVar

from nanovllm.errors import InvalidRequestError, NanoVLLMError
from nanovllm.validation import StrictKeywords, check_bool, check_float, check_int


@dataclasses.dataclass(frozen=True)
class SamplingParams(StrictKeywords):
    """How to choose the tokens of one request, and when to stop; nano-vllm's defaults.

    Raises:
        InvalidRequestError: a field is unknown, of the wrong type or out of range.
    """

    error: ClassVar[type[NanoVLLMError]] = InvalidRequestError

    temperature: float = 1.0
    """Divides the logits before sampling; 0 is greedy (the most likely token, always)."""
    max_tokens: int = 64
    """Most tokens to generate."""
    ignore_eos: bool = False
    """Go on past end-of-sequence tokens until max_tokens."""
    seed: int | None = None
    """Makes a sampled request repeatable, whatever runs beside it; None takes one from the
    engine's.
    """

    def __post_init__(self) -> None:
        error = InvalidRequestError
        temperature = check_float(error, "temperature", self.temperature, 0.0)
        object.__setattr__(self, "temperature", temperature)
        object.__setattr__(self, "max_tokens", check_int(error, "max_tokens", self.max_tokens, 1))
        check_bool(error, "ignore_eos", self.ignore_eos)
        if self.seed is not None:
            seed = check_int(error, "seed", self.seed, 0, 2**63 - 1)
            object.__setattr__(self, "seed", seed)
