"""Regular expressions from files, matched in a time that is linear in the text.

Python's `re` takes exponential time for some. A pattern becomes an automaton, so it may only have
what every automaton has: no look-around, no back-reference. Method: Thompson, "Regular expression
search algorithm" (1968), with its sets of states kept.
"""

import re
from collections.abc import Callable

MAX_LENGTH = 1_000
"""Characters of a pattern."""
_MAX_STATES = 4_000
_MAX_DEPTH = 20
"""Groups within groups."""
_MAX_KEPT = 10_000
"""Steps that are remembered."""
_TOKEN = re.compile(
    r"\\[dDwWsS]|\\[^A-Za-z0-9]|\[\^?\]?(?:\\.|[^\]\[\\])*\]|\(\?:|[*+?]\??"
    r"|\{(?:\d{1,3}|\d{0,3},\d{0,3})\}\??|[^\\]",
    re.DOTALL,
)
_CHARACTERS = re.compile(r"\\.|\[.+|[^()|*+?^$\[]", re.DOTALL)
"""Tokens that stand for one character of the text."""
_ALWAYS, _AT_START, _AT_END = "", "^", "$"

_States = frozenset[int]


class SafeRegex:
    """A regular expression in Python's syntax.

    Raises:
        ValueError: the syntax is wrong, or has something that no automaton has.
    """

    def __init__(self, pattern: str) -> None:
        if len(pattern) > MAX_LENGTH:
            raise ValueError(f"it has {len(pattern)} characters, at most {MAX_LENGTH} are read")
        self._tokens, self._place, self._depth = _tokens(pattern), 0, 0
        # By state: where it goes with a character that a test takes, and where with none.
        self._tests: list[tuple[re.Pattern[str], int] | None] = [None]
        self._free: list[list[tuple[str, int]]] = [[]]
        self._end = 0
        first = self._alternatives()(self._end)
        if self._place < len(self._tokens):
            raise ValueError("it has a ) without a (")
        self._start = self._closure({first}, _AT_START)
        self._next: dict[tuple[_States, str], _States] = {}

    def match(self, text: str) -> bool:
        """Return whether a beginning of `text` matches, as `re.match` does."""
        return self._run(text, whole=False)

    def fullmatch(self, text: str) -> bool:
        """Return whether all of `text` matches, as `re.fullmatch` does."""
        return self._run(text, whole=True)

    def _run(self, text: str, *, whole: bool) -> bool:
        states = self._start
        for character in text:
            if self._end in states and not whole:
                return True
            step = states, character
            if step not in self._next:
                if len(self._next) >= _MAX_KEPT:
                    self._next.clear()
                self._next[step] = self._step(*step)
            states = self._next[step]
            if not states:
                return False
        kinds = (_AT_END,) if text else (_AT_START, _AT_END)
        return self._end in self._closure(states, *kinds)

    def _step(self, states: _States, character: str) -> _States:
        tests = (test for test in map(self._tests.__getitem__, states) if test is not None)
        return self._closure({after for test, after in tests if test.fullmatch(character)})

    def _closure(self, states: set[int] | _States, *kinds: str) -> _States:
        """Return `states` and those that they reach with no character."""
        found, waiting = set(states), list(states)
        while waiting:
            for kind, after in self._free[waiting.pop()]:
                if after not in found and (kind == _ALWAYS or kind in kinds):
                    found.add(after)
                    waiting.append(after)
        return frozenset(found)

    def _state(
        self, *free: tuple[str, int], test: tuple[re.Pattern[str], int] | None = None
    ) -> int:
        if len(self._tests) >= _MAX_STATES:
            raise ValueError(f"it needs more than {_MAX_STATES} states")
        self._tests.append(test)
        self._free.append(list(free))
        return len(self._tests) - 1

    def _alternatives(self) -> "_Part":
        options = [self._sequence()]
        while self._peek() == "|":
            self._place += 1
            options.append(self._sequence())
        if len(options) == 1:
            return options[0]
        return lambda end: self._state(*((_ALWAYS, option(end)) for option in options))

    def _sequence(self) -> "_Part":
        parts: list[_Part] = []
        while self._peek() not in ("", "|", ")"):
            parts.append(self._repeated(self._item()))

        def build(end: int) -> int:
            for part in reversed(parts):
                end = part(end)
            return end

        return build

    def _item(self) -> "_Part":
        token = self._tokens[self._place]
        self._place += 1
        if token in ("(", "(?:"):
            self._depth += 1
            if self._depth > _MAX_DEPTH:
                raise ValueError(f"it has more than {_MAX_DEPTH} groups within groups")
            if self._peek().startswith("?"):
                raise ValueError(f"(?{''.join(self._tokens[self._place + 1 :])[:1]} is not read")
            inner = self._alternatives()
            if self._peek() != ")":
                raise ValueError("it has a ( without a )")
            self._place += 1
            self._depth -= 1
            return inner
        if token in (_AT_START, _AT_END):
            return lambda end: self._state((token, end))
        if _CHARACTERS.fullmatch(token) is None:
            raise ValueError(f"{token!r} has nothing before it to repeat")
        try:
            test = re.compile(token, re.DOTALL)
        except re.error as error:
            raise ValueError(f"{token!r}: {error}") from error
        return lambda end: self._state(test=(test, end))

    def _repeated(self, part: "_Part") -> "_Part":
        token = self._peek()
        if token[:1] not in tuple("*+?{") or token == "{":
            return part
        self._place += 1
        if self._peek()[:1] in tuple("*+?"):
            raise ValueError(f"{token!r} is repeated itself")
        symbol = token.removesuffix("?") or "?"
        least, most = {"*": (0, None), "+": (1, None), "?": (0, 1)}.get(symbol) or _counts(symbol)

        def build(end: int) -> int:
            if most is None:
                loop = self._state((_ALWAYS, end))
                self._free[loop].append((_ALWAYS, part(loop)))
                end = loop
            for _ in range((most or least) - least):
                end = self._state((_ALWAYS, end), (_ALWAYS, part(end)))
            for _ in range(least):
                end = part(end)
            return end

        return build

    def _peek(self) -> str:
        return self._tokens[self._place] if self._place < len(self._tokens) else ""


_Part = Callable[[int], int]
"""Makes the states of a part of a pattern, before state `end`; returns the first of them."""


def _tokens(pattern: str) -> list[str]:
    found, place = [], 0
    while place < len(pattern):
        token = _TOKEN.match(pattern, place)
        if token is None or token[0] == "[":
            raise ValueError(f"{pattern[place : place + 2]!r} is not read")
        found.append(token[0])
        place = token.end()
    return found


def _counts(symbol: str) -> tuple[int, int | None]:
    """Return the least and the largest number of repeats of "{2}", "{2,}", "{,3}" or "{2,3}"."""
    least, comma, most = symbol[1:-1].partition(",")
    counts = int(least or 0), int(most) if most else None if comma else int(least)
    if counts[1] is not None and counts[1] < counts[0]:
        raise ValueError(f"{symbol!r} has its counts in the wrong order")
    return counts
