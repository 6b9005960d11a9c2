"""Makes the script that shows a difference, of as few requests as show it.

The script computes one request alone and then in the way that differs, as `nanovllm prove` does.
"""

import runpy
import time
from collections.abc import Callable, Sequence as Seq
from pathlib import Path
from typing import NamedTuple

from nanovllm.apps.prove.requests import Bits, ProofRequest
from nanovllm.apps.prove.ways import ALONE, Calls, Setting, Way
from nanovllm.options.lora_request import LoRARequest

_MOST_SECONDS = 60.0
"""How long requests are left out one after the other."""


class Difference(NamedTuple):
    """A request whose answer depends on how it was computed."""

    setting: Setting
    way: Way
    request: int
    """Its index."""
    alone: Bits
    found: Bits

    def words(self) -> str:
        """Say where both answers begin to differ."""
        one, other = self.alone, self.found
        for position, pair in enumerate(zip(one.token_ids, other.token_ids, strict=False)):
            if pair[0] != pair[1]:
                return f"token {position} is {pair[1]}, alone {pair[0]}"
        if len(one.token_ids) != len(other.token_ids):
            return f"the answer has {len(other.token_ids)} tokens, alone {len(one.token_ids)}"
        for name in ("logprobs", "prompt_logprobs"):
            pairs = zip(getattr(one, name), getattr(other, name), strict=False)
            for position, (own, theirs) in enumerate(pairs):
                if own != theirs:
                    what = "prompt " if name == "prompt_logprobs" else ""
                    return f"{what}token {position} has log-probabilities {theirs}, alone {own}"
        return "the numbers of log-probabilities differ"


def shrunk(difference: Difference, differs: Callable[[Way], bool]) -> Way:
    """Return the difference's way with as few requests as still show it.

    Args:
        differs: whether a way with fewer requests shows it.
    """
    way = difference.way
    deadline = time.monotonic() + _MOST_SECONDS
    size = max(1, len(_others(way, difference.request)) // 2)
    while size and time.monotonic() < deadline:
        others = _others(way, difference.request)
        for start in range(0, len(others), size):
            if time.monotonic() > deadline:
                break
            fewer = _without(way, set(others[start : start + size]))
            if differs(fewer):
                way = fewer
        size = min(size // 2, len(others))
    return way


def _others(way: Way, index: int) -> list[int]:
    every = {each for calls in way.engines for call in calls for each in call}
    return sorted(every - {index})


def _without(way: Way, gone: set[int]) -> Way:
    engines: list[Calls] = []
    for calls in way.engines:
        left = (tuple(index for index in call if index not in gone) for call in calls)
        engines.append(tuple(call for call in left if call))
    return way._replace(engines=tuple(calls for calls in engines if calls))


def script(
    model: str,
    difference: Difference,
    way: Way,
    requests: Seq[ProofRequest],
    adapters: Seq[LoRARequest] = (),
) -> str:
    """Return a Python program that ends with an AssertionError if the difference shows.

    Args:
        way: the difference's, perhaps with fewer requests.
    """
    kept = sorted({*_others(way, difference.request), difference.request})
    place = {index: new for new, index in enumerate(kept)}
    engines = tuple(
        tuple(tuple(place[index] for index in call) for call in calls) for calls in way.engines
    )
    target = place[difference.request]
    alone = Way("alone", ALONE, (((target,),),))
    rows = "".join(f"    {tuple(requests[index])!r},\n" for index in kept)
    name = f"{difference.setting.name}, {way.name}".removeprefix(", ")
    return f'''"""In the way {name!r} {difference.words()}."""
from nanovllm import LoRARequest
from nanovllm.apps.prove.requests import ProofRequest
from nanovllm.apps.prove.runner import run
from nanovllm.apps.prove.ways import Way

REQUESTS = [ProofRequest(*each) for each in [  # prompt, sampling parameters, index of the adapter
{rows}]]
GIVEN = {{"model": {model!r}, "options": {difference.setting.options!r}}}
GIVEN |= {{"requests": REQUESTS, "adapters": {list(adapters)!r}}}
((_, alone),) = run(way={alone!r}, **GIVEN).answers
for index, found in run(way={way._replace(engines=engines)!r}, **GIVEN).answers:
    assert index != {target} or found == alone, f"\\nalone: {{alone}}\\nthere: {{found}}"
'''


def shows(path: Path) -> bool:
    """Run a script in this process; return whether the difference shows."""
    try:
        runpy.run_path(str(path))
    except AssertionError:
        return True
    return False
