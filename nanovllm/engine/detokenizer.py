"""Token ids to text, token by token: whole characters only, cut exactly at stop strings."""

import io
import itertools
from collections.abc import Callable, Sequence as Seq

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from nanovllm.options.sampling_params import TOKEN_MARK

_MAX_UNREAD = 32
"""Tokens that may wait for the end of their last character. A character has 4 bytes at most, so
more tokens than that are broken bytes, or have no text."""


class Detokenizer:
    """The text of one growing output.

    The text is the same as that of all tokens decoded at once, with one exception: text is never
    taken back. With byte fallback, a byte can make the characters before it invalid; here only that
    byte becomes U+FFFD. A token costs the same however long the output is.

    Args:
        skipped: tokens that have no text, besides those of `skip_special_tokens`.
        spaces_between_special_tokens: False leaves out what the decoder writes between two adjacent
            added tokens.
        stop: strings that end the text.
        include_stop: whether the text keeps the stop string that ended it.
        marked: tokens that get TOKEN_MARK before their text, for parsers. What only reads like such
            a token is not marked. After a mark, a character that the output leaves incomplete is
            decoded without the text before it.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skip_special_tokens: bool = True,
        skipped: frozenset[int] = frozenset(),
        spaces_between_special_tokens: bool = True,
        stop: Seq[str] = (),
        include_stop: bool = False,
        marked: frozenset[int] = frozenset(),
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._skipped = skipped
        self._stream = DecodeStream(skip_special_tokens=skip_special_tokens)
        self._added_tokens: dict[int, str] = {}  # those that join the one before without a space
        if not (skip_special_tokens or spaces_between_special_tokens):
            added = tokenizer.get_added_tokens_decoder()
            self._added_tokens = {token_id: token.content for token_id, token in added.items()}
        self._stops = StopStrings(stop, include=include_stop) if stop else _NO_STOPS
        self._marked = {i: tokenizer.decode([i], skip_special_tokens=False) for i in marked}
        self._token_ids: list[int] = []
        self._num_read = 0  # tokens whose text is in self.text; the rest is part of a character
        self._text = io.StringIO()  # grows in place: a str would be copied for each token
        self.num_chars = 0
        self.stop_string: str | None = None

    @property
    def text(self) -> str:
        """The whole text so far."""
        return self._text.getvalue()

    def read(self, start: int, end: int) -> str:
        """Return the characters of the text from `start` to `end`."""
        self._text.seek(start)
        return self._text.read(max(0, end - start))

    def add(self, token_id: int, *, search: bool = True) -> bool:
        """Append a token; return whether a stop string is now complete, which ends the text. With
        search=False, what this token completes is ignored for good.
        """
        if token_id in self._skipped:
            return False
        self._token_ids.append(token_id)
        num_searched = self.num_chars
        self._write(self._marked_step(token_id) if self._marked else self._step(token_id))
        return search and self._find_stop(num_searched)

    def add_all(self, token_ids: list[int]) -> None:
        """Append all tokens of an output at once, without searching; faster than one by one."""
        if self._skipped:
            token_ids = [token_id for token_id in token_ids if token_id not in self._skipped]
        whole = self._tokenizer.decode(token_ids, skip_special_tokens=self._skip_special_tokens)
        one_by_one = (
            # A byte may have made characters before it invalid: see the class.
            "\ufffd" in whole
            or any(self._is_joined(*pair) for pair in itertools.pairwise(token_ids))
            or not self._marked.keys().isdisjoint(token_ids)
        )
        if one_by_one:
            for token_id in token_ids:
                self.add(token_id, search=False)
        else:
            self._token_ids = list(token_ids)
            self._num_read = len(token_ids)
            self._write(whole)

    def finish(self, *, search: bool = True) -> bool:
        """Add the rest of the text, where an incomplete character becomes U+FFFD; return whether a
        stop string is complete.
        """
        if self.stop_string is None and self._num_read < len(self._token_ids):
            num_searched = self.num_chars
            whole = self._decode(0)
            kept = whole.startswith(self.text)
            self._write(whole[num_searched:] if kept else self._decode(self._num_read))
            self._num_read = len(self._token_ids)
            if search:
                self._find_stop(num_searched)
        return self.stop_string is not None

    def safe_length(self, *, finished: bool) -> int:
        """Return how many characters of the text are final, so that they can be sent."""
        if finished:
            return self.num_chars
        return max(0, self.num_chars - self._stops.num_held_back)

    def _write(self, piece: str) -> None:
        """Append to the text."""
        self._text.seek(self.num_chars)
        self._text.write(piece)
        self.num_chars += len(piece)

    def _step(self, token_id: int) -> str:
        """Return the text that the next token adds; "" while its last character is incomplete."""
        try:
            piece = self._stream.step(self._tokenizer, token_id) or ""
        except Exception:  # tokenizers' only class: the new bytes change the text of the old ones
            piece = self._decode(self._num_read)
            self._restart(self._num_read)
            if piece.endswith("\ufffd"):  # incomplete: a later step returns it
                piece = ""
        if len(self._token_ids) > 1 and self._is_joined(*self._token_ids[-2:]):
            piece = self._added_tokens[token_id]
        if piece:
            self._num_read = len(self._token_ids)
        elif len(self._token_ids) - self._num_read >= _MAX_UNREAD:
            piece = self._read_broken()
        return piece

    def _marked_step(self, token_id: int) -> str:
        """Return what `_step` does, with TOKEN_MARK before a marked token."""
        piece = self._step(token_id)
        content = self._marked.get(token_id)
        if content is not None and piece.endswith(content):
            piece = f"{piece.removesuffix(content)}{TOKEN_MARK}{content}"
        return piece

    def _read_broken(self) -> str:
        """Return the text of the unread tokens but the last few: no token to come completes them.

        The stream would decode all of them again with each token.
        """
        start = self._num_read
        whole = self._decode(self._num_read)
        # A character has 4 bytes at most: one of 4 neighbouring places is between two characters.
        for end in range(len(self._token_ids) - 3, len(self._token_ids) - 7, -1):
            piece = self._decode(start, end)
            if piece + self._decode(end) == whole:
                break
        self._num_read = end
        self._restart(end)
        return piece

    def _restart(self, start: int) -> None:
        """Make a stream of which the tokens from `start` on are not read yet."""
        self._stream = DecodeStream(
            self._token_ids[start:], skip_special_tokens=self._skip_special_tokens
        )

    def _is_joined(self, token_id: int, next_token_id: int) -> bool:
        return token_id in self._added_tokens and next_token_id in self._added_tokens

    def _decode(self, start: int, end: int | None = None) -> str:
        skip = self._skip_special_tokens
        return self._tokenizer.decode(self._token_ids[start:end], skip_special_tokens=skip)

    def _find_stop(self, num_searched: int) -> bool:
        """Cut the text at the stop string that is complete first; return whether there is one."""
        found = self._stops.find(self.read, num_searched, self.num_chars)
        if found is None:
            return False
        self.stop_string, self.num_chars = found
        self._text.truncate(self.num_chars)
        return True


class StopStrings:
    """The stop strings of one output; `include` keeps the one that ended it."""

    def __init__(self, stop: Seq[str], *, include: bool) -> None:
        self._places = {string: place for place, string in reversed(list(enumerate(stop)))}
        self._lengths = sorted({len(string) for string in stop}, reverse=True)
        self._include = include
        # The last characters of the text, in which a stop string may begin:
        self.num_held_back = 0 if include else max(self._lengths, default=1) - 1

    def find(
        self, read: Callable[[int, int], str], num_searched: int, num_chars: int
    ) -> tuple[str, int] | None:
        """Return the stop string that is complete first, and where the text ends then. Of several
        that end together it is the first listed. `read` returns the characters between two places;
        of `num_chars`, `num_searched` were searched before.
        """
        if not self._lengths:
            return None
        first = max(0, num_searched + 1 - self._lengths[0])
        text = read(first, num_chars)  # all in which a stop string may lie
        for end in range(num_searched + 1 - first, len(text) + 1):
            ended = (text[max(0, end - length) : end] for length in self._lengths)
            if found := [stop for stop in ended if stop in self._places]:
                stop = min(found, key=self._places.__getitem__)
                return stop, first + (end if self._include else end - len(stop))
        return None


_NO_STOPS = StopStrings((), include=False)
