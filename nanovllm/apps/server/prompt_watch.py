"""Finds what changes near the beginning of prompts and so keeps the prefix cache from its work: a
date, a count, an id of a request.
"""

import logging
import re
from collections import deque

from nanovllm.engine.prompt import Prompt
from nanovllm.outputs import RequestOutput

logger = logging.getLogger(__name__)

_KEPT = 8
"""Prompts that a new one is compared with."""
_MAX_CHARS = 2**16
"""Of a prompt."""
_LONGEST_PIECE = 96
"""Characters of a piece that changes."""
_SAME_AFTERWARDS = 512
"""Characters that must be equal after it; the ends of other conversations are alike for less."""


class PromptWatch:
    """Warns once of each piece that is all that is new in the beginning of a prompt.

    The log has no text of prompts, so the warning tells where the piece stands and what it looks
    like: digits are 9, letters a or A.
    """

    def __init__(self) -> None:
        self._prompts: deque[str] = deque(maxlen=_KEPT)
        self._known: deque[tuple[int, str]] = deque(maxlen=64)

    def observe(self, prompt: Prompt, output: RequestOutput) -> None:
        """Compare a request's prompt with earlier ones; `output` is its first."""
        text = (prompt.text or "")[:_MAX_CHARS]
        starts = [_common_length(text, other) for other in self._prompts]
        best = max(range(len(starts)), key=starts.__getitem__, default=None)
        if best is not None and (end := _changed_until(text, self._prompts[best], starts[best])):
            self._warn(text, starts[best], end, output)
        self._prompts.append(text)

    def _warn(self, text: str, start: int, end: int, output: RequestOutput) -> None:
        begin = max(text.rfind(space, 0, start) for space in " \n") + 1
        shape = re.sub(r"\d", "9", text[max(begin, start - _LONGEST_PIECE) : end])
        shape = re.sub(r"[^\W\d_]", lambda m: "A" if m[0].isupper() else "a", shape)
        if (start, shape) in self._known:
            return
        self._known.append((start, shape))
        num_tokens = len(output.prompt_token_ids)
        logger.warning(
            "two prompts differ only in a piece like %r at character %d of %d: %d of %d tokens "
            "were computed again; move it to the end of the prompt, or leave it out",
            *(shape, start, len(text), num_tokens - output.num_cached_tokens, num_tokens),
        )


def _common_length(a: str, b: str) -> int:
    """Return how many characters two texts begin with in common."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a.startswith(b[low:middle], low):
            low = middle
        else:
            high = middle - 1
    return low


def _changed_until(new: str, old: str, start: int) -> int | None:
    """Return where the piece of `new` ends that differs from `old`; None: more differs."""
    for end in range(start, min(start + _LONGEST_PIECE, len(new) - _SAME_AFTERWARDS)):
        same = new[end : end + _SAME_AFTERWARDS]
        if old.find(same, start, start + _LONGEST_PIECE + _SAME_AFTERWARDS) >= 0:
            return end
    return None
