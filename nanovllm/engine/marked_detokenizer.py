"""Token ids to text in which certain tokens are marked, for parsers of the text."""

from typing import Any

from tokenizers import Tokenizer

from nanovllm.engine.detokenizer import Detokenizer
from nanovllm.options.sampling_params import TOKEN_MARK


class MarkedDetokenizer(Detokenizer):
    """A text with TOKEN_MARK before each of some special tokens.

    What reads like such a token, and is none, is not marked. Behind a mark, a character that the
    output leaves incomplete is decoded without the text before it.

    Args:
        marked: ids of the tokens.
        options: those of Detokenizer.
    """

    def __init__(self, tokenizer: Tokenizer, marked: frozenset[int], **options: Any) -> None:
        super().__init__(tokenizer, **options)
        self._marked = {i: tokenizer.decode([i], skip_special_tokens=False) for i in marked}

    def add_all(self, token_ids: list[int]) -> None:
        if self._marked.keys().isdisjoint(token_ids):
            super().add_all(token_ids)
            return
        for token_id in token_ids:
            self.add(token_id, search=False)

    def _step(self, token_id: int) -> str:
        piece = super()._step(token_id)
        content = self._marked.get(token_id)
        if content is not None and piece.endswith(content):
            piece = f"{piece.removesuffix(content)}{TOKEN_MARK}{content}"
        return piece
