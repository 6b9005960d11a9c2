"""`SpeculativeConfig`: how draft tokens are proposed. vLLM's names. Knows no other option."""

import dataclasses

METHODS = ("ngram", "draft_model", "eagle3", "auto")


@dataclasses.dataclass(frozen=True)
class SpeculativeConfig:
    """The options of `Config.speculative_config`."""

    method: str
    """"ngram" (prompt lookup), "draft_model", "eagle3", or "auto", which is "ngram"."""
    model: str | None = None
    """Checkpoint of the draft network: a directory or hub id."""
    num_speculative_tokens: int | None = None
    """Most tokens to propose for a sequence in one step; None is 24 for ngram, else 8. A controller
    proposes as many of them as are expected to pay."""
    prompt_lookup_max: int = 4
    """Longest n-gram to look up, in tokens."""
    prompt_lookup_min: int = 2
    """Shortest n-gram to look up, in tokens."""

    @property
    def max_draft_tokens(self) -> int:
        """`num_speculative_tokens`, or its default."""
        if self.num_speculative_tokens is not None:
            return self.num_speculative_tokens
        return 24 if self.method == "ngram" else 8
