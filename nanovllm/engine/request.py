"""What the engine keeps of a request: one prompt, its n sequences and what was sent of each.

Knows no tokenizer and no scheduling. The scheduler sees the sequences only.
"""

import time
from collections.abc import Callable

from nanovllm.engine.detokenizer import Detokenizer
from nanovllm.options.lora_request import LoRARequest
from nanovllm.options.sampling_params import RequestOutputKind, SamplingParams
from nanovllm.outputs import RequestOutput
from nanovllm.scheduler.sequence import Sequence


class Request:
    """A prompt, its n sequences and the times of its events.

    Args:
        prompt: the prompt's text; None if it was given as token ids.
        sequences: one for each of the params.n continuations.
        lora_request: the adapter of all its sequences.
        stream: whether the request returns a delta after each step, or one output at its end.
        request_id: the caller's own id; None takes that of the first sequence.
    """

    def __init__(
        self,
        prompt: str | None,
        params: SamplingParams,
        sequences: list[Sequence],
        request_id: str | None = None,
        lora_request: LoRARequest | None = None,
        *,
        stream: bool,
    ) -> None:
        self.request_id = sequences[0].seq_id if request_id is None else request_id
        self.prompt = prompt
        self.prompt_token_ids = list(sequences[0].token_ids)  # shared by all its outputs
        self.params = params
        self.lora_request = lora_request
        self.sequences = sequences
        self.stream = stream
        # Else nobody looks at the text before its end, and all of it is decoded at once.
        self.decodes_each_step = stream or bool(params.stop)
        self.deliver: Callable[[RequestOutput], object] | None = None  # see LLMEngine.queue
        self.arrival_time = time.monotonic()
        self.first_scheduled_time: float | None = None
        self.first_token_time: float | None = None
        self.last_token_time: float | None = None
        self.sent_prompt_logprobs = False
        self.unqueued = list(sequences)  # sequences that the scheduler does not have yet

    @property
    def sends_all(self) -> bool:
        """Whether each output of a stream holds all so far, not only what is new."""
        return self.params.output_kind is RequestOutputKind.CUMULATIVE

    @property
    def is_finished(self) -> bool:
        return all(seq.is_finished for seq in self.sequences)


class Completion:
    """One sequence of a request: which of its tokens were read, and which were sent."""

    def __init__(
        self, request: Request, index: int, seq: Sequence, detokenizer: Detokenizer | None
    ) -> None:
        self.request = request
        self.index = index
        self.seq = seq
        self.detokenizer = detokenizer
        self.num_tokens = 0  # output tokens read; tokens after a stop string are never read
        self.num_sent_tokens = 0
        self.num_sent_chars = 0
        self.cumulative_logprob = 0.0  # of the tokens sent
        self.sent_end = False  # whether an output with the finish reason was sent

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
            seq.finish_reason == "stop"
            and not isinstance(seq.stop_reason, str)
            and self.num_tokens == seq.num_output_tokens
            and seq.token_ids[-1] in seq.stop_token_ids
            and not self.request.params.include_stop_str_in_output
        )
