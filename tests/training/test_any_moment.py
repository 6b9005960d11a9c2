"""An exception may end a call that changes the engine's weights at any line, as a time-out by
SIGALRM does: the engine then answers as its state says, or refuses, and can go on.
"""

import linecache
import os
import random
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import nanovllm
from nanovllm import LLM
from nanovllm.errors import InvalidRequestError
from tests.every_case import EVERY_CASE
from tests.training.test_updates import OPTIONS, tokens_of
from tests.training.weights import SMALL, Weights, changed, checkpoint_of, read_weights

PACKAGE = str(Path(nanovllm.__file__).parent)
STEP = 7 if EVERY_CASE else 37
"""One of so many lines is tried."""
Place = tuple[str, int]


class TimeIsOverError(Exception):
    """What a handler raises."""


def late(*_: object) -> None:
    raise TimeIsOverError


class Lines:
    """Follows the lines of the package's files that run in this thread; may act at one of them."""

    def __init__(self, files: Callable[[str], bool], act: Callable[[], object] = late) -> None:
        self.seen: Counter[Place] = Counter()
        self._files = files
        self._act = act
        self._left: tuple[Place, int] | None = None

    def run(self, call: Callable[[], object], place: Place | None = None, count: int = 0) -> None:
        """Run `call`; act when it reaches `place` for the time `count`: it must raise then."""
        self.seen.clear()
        self._left = None if place is None else (place, count)
        sys.settrace(self._trace)
        try:
            call()
        except TimeIsOverError:
            return
        finally:
            sys.settrace(None)
        assert place is None or self._left is not None, f"{place} raised in vain"

    def _trace(self, frame: FrameType, event: str, _: object) -> Any:
        file = frame.f_code.co_filename
        if not (file.startswith(PACKAGE) and self._files(file)):
            return None
        place = file, frame.f_lineno
        # Python looks for signals at no end of a `with` block, which this would skip.
        if event == "line" and not linecache.getline(*place).lstrip().startswith("with "):
            self.seen[place] += 1
            if self._left == (place, self.seen[place]):
                self._left = None
                self._act()
        return self._trace


def failing(weights: Weights) -> Iterator[Any]:
    yield from list(weights.items())[: len(weights) // 2]
    raise TimeIsOverError


def in_parts(llm: LLM, new: Weights) -> None:
    llm.start_weight_update()
    llm.update_weights(list(new.items())[:5])
    llm.update_weights(list(new.items())[5:])
    llm.finish_weight_update(weight_version="new")


CALLS: dict[str, Callable[[LLM, Weights, str], object]] = {
    "sleep": lambda llm, new, path: llm.sleep(),
    "sleep, wait": lambda llm, new, path: llm.sleep(mode="wait"),
    "sleep 2": lambda llm, new, path: llm.sleep(level=2),
    "wake_up": lambda llm, new, path: (llm.sleep(), llm.wake_up()),
    "update": lambda llm, new, path: llm.update_weights(new, weight_version="new"),
    "files": lambda llm, new, path: llm.update_weights(path, weight_version="new"),
    "parts": lambda llm, new, path: in_parts(llm, new),
    "failing": lambda llm, new, path: llm.update_weights(failing(new), weight_version="new"),
    "reset": lambda llm, new, path: llm.reset_prefix_cache(reset_running_requests=True),
}


@pytest.fixture
def alarm() -> Iterator[None]:
    before = signal.signal(signal.SIGALRM, late)
    yield
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("kind", ["signal", "exception"])
@pytest.mark.usefixtures("alarm")
def test_a_call_that_ends_at_any_line(
    kind: str, shared_checkpoint: Callable[..., str], make_llm: Callable[..., LLM], tmp_path: Path
) -> None:
    """Symptom: sleep() says it was interrupted, and the engine answers with weights of zeros."""
    model = shared_checkpoint(**SMALL)
    old = read_weights(model)
    new = changed(old, 1)
    path = checkpoint_of(model, new, tmp_path)
    llm = make_llm(model, **OPTIONS)
    expected = {0: tokens_of(llm)}
    llm.update_weights(new, weight_version="new")
    expected["new"] = tokens_of(llm)
    llm.update_weights(old, weight_version=0)
    if kind == "signal":
        lines = Lines(lambda file: True, lambda: signal.raise_signal(signal.SIGALRM))
    else:  # at lines that see to it: elsewhere only signals raise what no one expects
        lines = Lines(lambda file: "/training/" in file or file.endswith("control_api.py"))

    def restore() -> None:
        if llm.engine.weights is not None and llm.engine.weights.is_open:
            llm.finish_weight_update()
        llm.wake_up()
        llm.update_weights(old, weight_version=0)
        assert tokens_of(llm) == expected[0]

    num_refused = num_tried = 0
    for seed, (name, call) in enumerate(CALLS.items()):
        rng = random.Random(seed)
        lines.run(lambda call=call: call(llm, new, path))  # type: ignore[misc]
        restore()
        for place, count in list(lines.seen.items())[rng.randrange(STEP) :: STEP]:
            num_tried += 1
            lines.run(
                lambda call=call: call(llm, new, path),  # type: ignore[misc]
                place,
                rng.randint(1, count),
            )
            at = name, os.path.relpath(place[0], PACKAGE), place[1]
            try:
                assert tokens_of(llm) == expected[llm.weight_version], at  # type: ignore[index]
            except InvalidRequestError:
                num_refused += 1
            restore()
    assert 0 < num_refused < num_tried
