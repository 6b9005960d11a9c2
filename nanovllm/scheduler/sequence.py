"""One request's tokens and counts. Changed by the scheduler and its block manager only.

Knows no phases: what is left to do is `num_tokens - num_computed_tokens`.
"""

from nanovllm.sampling_params import SamplingParams
from nanovllm.scheduler.messages import TokenLogprobs

ROOT_UID = 0
"""The parent of every first block in the prefix cache."""


class Sequence:
    """A prompt and what has been generated for it.

    Invariants: `num_computed_tokens <= num_tokens`; a sequence owns KV blocks only while it owns a
    table row.
    """

    __slots__ = (
        "bad_words",
        "block_keys",
        "block_table",
        "draft_token_ids",
        "finish_reason",
        "logprobs",
        "max_num_tokens",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_in_flight_steps",
        "num_pending_tokens",
        "num_prompt_tokens",
        "num_published_blocks",
        "params",
        "parent_uid",
        "priority",
        "prompt_logprobs",
        "seed",
        "seq_id",
        "stop_reason",
        "stop_token_ids",
        "table_idx",
        "token_ids",
    )

    def __init__(
        self,
        seq_id: int,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        seed: int = 0,
        priority: int = 0,
        bad_words: tuple[tuple[int, ...], ...] = (),
    ) -> None:
        self.seq_id = seq_id  # grows with arrival, so it also orders arrivals
        self.token_ids = list(prompt_token_ids)  # the tokens whose values are known
        self.num_prompt_tokens = len(prompt_token_ids)
        self.params = params
        self.seed = seed
        self.priority = priority
        self.bad_words = bad_words  # params.bad_words as tokens
        self.stop_token_ids: frozenset[int] = frozenset()  # set when it is queued
        self.max_num_tokens = 0  # set when it is queued

        self.num_computed_tokens = 0  # tokens whose KV is written, or will be by a launched step
        self.num_pending_tokens = 0  # tokens that a launched step will sample
        self.num_in_flight_steps = 0  # launched steps that hold a row of this sequence
        self.draft_token_ids: list[int] = []  # guesses at the next tokens, to be verified
        self.num_cached_tokens: int | None = None  # prefix hit at first admission; None before it
        self.table_idx: int | None = None  # row in the worker's tables; None while waiting
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None  # the stop token or string, if not an EOS id
        self.logprobs: list[TokenLogprobs] = []  # of the output, if asked for
        self.prompt_logprobs: dict[int, TokenLogprobs] = {}  # by position, if asked for

        # Kept by the block manager.
        self.block_table: list[int] = []
        self.block_keys: list[tuple[int, bytes]] = []  # (hash, tokens) of each full block
        self.num_published_blocks = 0
        self.parent_uid: int | None = ROOT_UID  # cached block to publish under; None: chain broken

    @property
    def num_tokens(self) -> int:
        """Tokens known, on their way and guessed; those that may be computed."""
        return len(self.token_ids) + self.num_pending_tokens + len(self.draft_token_ids)

    @property
    def room(self) -> int:
        """Tokens that may still be appended to the known ones."""
        return self.max_num_tokens - len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Generated tokens whose values are known."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def order(self) -> tuple[int, int]:
        """Sort key: lower priority values first, then arrival."""
        return (self.priority, self.seq_id)
