"""Finds the stop string that ends a growing text. Knows no tokens."""

from collections.abc import Callable, Sequence as Seq


class StopStrings:
    """The stop strings of one output.

    Args:
        include: whether the text keeps the stop string that ended it.
    """

    def __init__(self, stop: Seq[str], *, include: bool) -> None:
        self._places = {string: place for place, string in reversed(list(enumerate(stop)))}
        self._lengths = sorted({len(string) for string in stop}, reverse=True)
        self._include = include
        self.num_held_back = 0 if include else max(self._lengths, default=1) - 1
        """Number of last characters of the text in which a stop string may begin."""

    def find(
        self, read: Callable[[int, int], str], num_searched: int, num_chars: int
    ) -> tuple[str, int] | None:
        """Return the stop string that is complete first, and where the text ends then. Of several
        that end together it is the first listed.

        Args:
            read: returns the characters of the text between two places.
            num_searched: length of the text that was searched before.
            num_chars: length of the text.
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
