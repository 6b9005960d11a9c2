"""Log-probabilities as users see them: by token, with rank and text. Knows no requests."""

from nanovllm.checkpoint.text_tokenizer import TextTokenizer
from nanovllm.outputs import Logprob
from nanovllm.scheduler.messages import TokenLogprobs


class LogprobEntries:
    """Makes the entries of a position, and keeps the texts of their tokens.

    Args:
        tokenizer: None if the checkpoint has none; entries then have no text.
    """

    def __init__(self, tokenizer: TextTokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._texts: dict[int, str] = {}  # of tokens that are decoded alone

    def make(self, found: TokenLogprobs, *, with_text: bool) -> dict[int, Logprob]:
        """Return the entries of one position, the token itself first."""
        ranks = [found.rank, *range(1, len(found.token_ids))]
        entries: dict[int, Logprob] = {}
        for token, logprob, rank in zip(found.token_ids, found.logprobs, ranks, strict=True):
            text = self._text(token) if with_text else None
            entries.setdefault(token, Logprob(logprob, rank, text))
        return entries

    def _text(self, token_id: int) -> str | None:
        if self._tokenizer is None:
            return None
        if token_id not in self._texts:
            decode = self._tokenizer.backend_tokenizer.decode
            self._texts[token_id] = decode([token_id], skip_special_tokens=False)
        return self._texts[token_id]
