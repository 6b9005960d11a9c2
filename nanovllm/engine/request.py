"""What the engine keeps for a request: one prompt, its n sequences and what was sent of each.

The scheduler sees only the sequences.
"""

import time
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field

from nanovllm.core.sequence import Sequence
from nanovllm.engine.detokenizer import Detokenizer
from nanovllm.options.lora_request import LoRARequest
from nanovllm.options.sampling_params import RequestOutputKind, SamplingParams
from nanovllm.outputs import RequestOutput


@dataclass(slots=True, eq=False, repr=False)
class Request:
    """A prompt, its n sequences and the times of its events."""

    prompt: str | None  # its text; None if it was given as token ids
    params: SamplingParams
    sequences: list[Sequence]  # one for each of the params.n continuations
    own_id: str | None = None  # the caller's
    lora_request: LoRARequest | None = None  # the adapter of all its sequences
    _: KW_ONLY
    stream: bool  # whether it returns a delta after each step, or one output at its end

    request_id: int | str = field(init=False)  # `own_id`, or else the first sequence's id
    prompt_token_ids: list[int] = field(init=False)  # shared by all its outputs
    # Otherwise the text is decoded once, at the end.
    decodes_each_step: bool = field(init=False)
    deliver: Callable[[RequestOutput], object] | None = None  # see LLMEngine.queue
    arrival_time: float = field(default_factory=time.monotonic)
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None
    sent_prompt_logprobs: bool = False
    unqueued: list[Sequence] = field(init=False)  # those that the scheduler does not have yet

    def __post_init__(self) -> None:
        self.request_id = self.sequences[0].seq_id if self.own_id is None else self.own_id
        self.prompt_token_ids = list(self.sequences[0].token_ids)
        self.decodes_each_step = self.stream or bool(self.params.stop)
        self.unqueued = list(self.sequences)

    @property
    def sends_all(self) -> bool:
        """Whether each output of a stream holds all so far, not only what is new."""
        return self.params.output_kind is RequestOutputKind.CUMULATIVE

    @property
    def is_finished(self) -> bool:
        return all(seq.is_finished for seq in self.sequences)


@dataclass(slots=True, eq=False, repr=False)
class Completion:
    """One sequence of a request: which of its tokens were read, and which were sent."""

    request: Request
    index: int
    seq: Sequence
    detokenizer: Detokenizer | None
    num_tokens: int = 0  # output tokens read; tokens after a stop string are never read
    num_sent_tokens: int = 0
    num_sent_chars: int = 0
    cumulative_logprob: float = 0.0  # of the tokens sent
    sent_end: bool = False  # whether an output with the finish reason was sent
    # Versions of the weights, each with the number of tokens before its first one.
    weight_versions: list[tuple[int | str, int]] = field(default_factory=list)

    @property
    def has_delta(self) -> bool:
        """Whether there are tokens or a finish reason to send; new tokens may have no text yet."""
        ended = self.seq.is_finished and not self.sent_end
        return ended or self.num_tokens > self.num_sent_tokens

    @property
    def ends_with_hidden_stop(self) -> bool:
        """Whether the last token read is a stop token that the text leaves out."""
        seq = self.seq
        return (
            seq.output.finish_reason == "stop"
            and not isinstance(seq.output.stop_reason, str)
            and self.num_tokens == seq.num_output_tokens
            and seq.token_ids[-1] in seq.stop_token_ids
            and not self.request.params.include_stop_str_in_output
        )
