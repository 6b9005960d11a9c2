"""Texts and pairs of texts to token ids, cut where a model or a request says so."""

from collections.abc import Callable
from typing import Any

from tokenizers import Tokenizer
from tokenizers.normalizers import Lowercase, Sequence

from nanovllm.engine.input_checks import PromptLimit
from nanovllm.errors import InvalidRequestError
from nanovllm.loading.text_tokenizer import TextTokenizer

_UNSETTLED_CHARS = 4096
"""At the end of a slice of a text: far more than those whose tokens the text after it changes."""


class Texts:
    """Makes token ids of texts.

    Args:
        max_tokens: where a checkpoint cuts what it reads; None: nowhere.
        lowers_case: whether it lowers texts first, as sentence-transformers' do_lower_case does.
        cut_side: which side of a text it cuts off, "right" or "left".
    """

    def __init__(
        self,
        tokenizer: TextTokenizer,
        limit: PromptLimit,
        max_tokens: int | None = None,
        lowers_case: bool = False,
        cut_side: str = "right",
    ) -> None:
        backend: Any = tokenizer.backend_tokenizer
        if lowers_case:
            backend = Tokenizer.from_str(backend.to_str())
            own = [] if backend.normalizer is None else [backend.normalizer]
            backend.normalizer = Sequence([Lowercase(), *own])
        self._backend = backend
        self.limit = limit
        # A text between the engine's own limit and the checkpoint's is refused, not cut.
        self._max_tokens = max_tokens if max_tokens and max_tokens <= limit.most else None
        self._cut_side = cut_side

    def one(self, text: str, kept: int | None) -> list[int]:
        """Return the tokens of a text, with those that the tokenizer puts around it.

        Args:
            kept: how many tokens to keep in all, from the text's beginning; -1: as many as fit;
                None: what the checkpoint says, else to refuse a text that is too long.
        """
        most = self.most(kept)
        if most is None:
            self.limit.check_length(text, self._ids)
            return self._ids(text)
        side = self._cut_side if kept is None else "right"
        encoding = self._begun(text, most if side == "right" else len(text))
        room = max(0, most - self._backend.num_special_tokens_to_add(False))
        encoding.truncate(room, direction=side)
        tokens: list[int] = self._backend.post_process(encoding).ids
        return tokens[:most]

    def pair(self, first: str, second: str, kept: int | None) -> list[int]:
        """Return the tokens of two texts, with those that the tokenizer puts around them.

        Args:
            kept: how many tokens of the second text to keep; -1 and None: as for `one`. A
                checkpoint cuts the longer one.

        Raises:
            PromptTooLongError: they are too long.
        """
        limit = self.limit
        added = self._backend.num_special_tokens_to_add(True)
        cut = self._max_tokens if kept is None else None
        if cut is None:
            limit.check_text("the query", first)
        is_whole = kept is None and cut is None
        if is_whole:
            limit.check_text("the document", second)
        reads_all = is_whole or self._cut_side == "left"
        one, other = (
            self._begun(text, len(text) if reads_all else limit.most) for text in (first, second)
        )
        if cut is not None:
            room = max(0, cut - added)
            short = min(len(one), len(other), room // 2)
            lengths = (short, room - short) if len(one) <= len(other) else (room - short, short)
            one.truncate(min(len(one), lengths[0]), direction=self._cut_side)
            other.truncate(min(len(other), lengths[1]), direction=self._cut_side)
        room = limit.most - added - len(one)
        if kept is not None:
            other.truncate(max(0, room if kept == -1 else kept))
        tokens: list[int] = self._backend.post_process(one, other).ids
        if len(other) > room:
            raise limit.exceeded(str(len(tokens)))
        return tokens

    def written(self, write: Callable[[str], str], text: str, kept: int | None) -> list[int]:
        """Return the tokens of `write(text)`, in which the special ones are spelled out.

        Args:
            kept: as for `one`: `text` is cut at its end, not what is written around it.

        Raises:
            PromptTooLongError: what is around the text is too long.
        """
        most = self.most(kept)
        if most is None:
            self.limit.check_text("the prompt", text)
        else:
            text = self.beginning(text, most)
        tokens = self.plain(write(text))
        while most is not None and len(tokens) > most and text:
            text = self.beginning(text, len(self.plain(text)) - (len(tokens) - most))
            tokens = self.plain(write(text))
        if len(tokens) > self.limit.most:
            raise self.limit.exceeded(str(len(tokens)))
        return tokens

    def beginning(self, text: str, kept: int) -> str:
        """Return the part of a text that its first `kept` tokens hold."""
        if kept <= 0:
            return ""
        offsets = self._begun(text, kept).offsets
        return text if len(offsets) <= kept else text[: offsets[kept - 1][1]]

    def plain(self, text: str) -> list[int]:
        """Return the tokens of a text alone."""
        ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        return ids

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self._backend.encode(text).ids
        return ids

    def most(self, kept: int | None) -> int | None:
        """Return how many tokens of a prompt to keep; None: all."""
        if kept is not None and kept > self.limit.most:
            raise InvalidRequestError(
                f"truncate_prompt_tokens must be at most {self.limit.most}, the most tokens of a "
                f"prompt here, got {kept}: give -1 to keep as many as fit"
            )
        if kept == -1:
            return self._max_tokens or self.limit.most
        return self._max_tokens if kept is None else kept

    def _begun(self, text: str, most: int) -> Any:
        """Return the encoding of a text, or of a part of it with more than `most` tokens: the rest
        of a text that is cut costs nothing.
        """
        size = 8 * most + _UNSETTLED_CHARS
        while True:
            found = self._backend.encode(text[:size], add_special_tokens=False)
            settled = size - _UNSETTLED_CHARS
            if size >= len(text) or (len(found) > most and found.offsets[most][1] < settled):
                return found
            size *= 2
