"""Ctrl-C waits for the end of a block, except in what the block lets it interrupt."""

import signal
import threading
from collections.abc import Callable, Iterator

import pytest

from nanovllm.engine.delayed_interrupt import DelayedInterrupt


def press() -> None:
    signal.raise_signal(signal.SIGINT)


@pytest.fixture(autouse=True)
def handler_stays() -> Iterator[None]:
    before = signal.getsignal(signal.SIGINT)
    yield
    assert signal.getsignal(signal.SIGINT) is before


def test_it_comes_at_the_end_of_the_block() -> None:
    done = []

    def block() -> None:
        with DelayedInterrupt():
            press()
            press()
            done.append(True)

    with pytest.raises(KeyboardInterrupt):
        block()
    assert done


def test_it_interrupts_a_function_at_once() -> None:
    done = []

    def compute() -> None:
        press()
        done.append(True)

    with pytest.raises(KeyboardInterrupt), DelayedInterrupt() as interrupt:
        interrupt.interruptible(compute)
    assert not done


def test_one_that_came_before_interrupts_the_next_function() -> None:
    done = []

    def block() -> None:
        with DelayedInterrupt() as interrupt:
            press()
            interrupt.interruptible(done.append, True)

    with pytest.raises(KeyboardInterrupt):
        block()
    assert not done


def test_a_second_one_waits_for_what_the_first_one_began() -> None:
    done = []

    def block() -> None:
        with DelayedInterrupt() as interrupt:
            try:
                interrupt.interruptible(press)
            except KeyboardInterrupt:
                press()
                done.append(True)
                raise

    with pytest.raises(KeyboardInterrupt):
        block()
    assert done


@pytest.mark.parametrize("in_function", [True, False])
def test_a_handler_that_returns_is_called_each_time(in_function: bool) -> None:
    calls: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: calls.append(number))
    try:
        with DelayedInterrupt() as interrupt:
            for count in (1, 2):
                if in_function:
                    interrupt.interruptible(press)
                    assert len(calls) == count
            press()
            assert len(calls) == 2 * in_function
        assert len(calls) == 2 * in_function + 1
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("handler", [signal.SIG_IGN, signal.SIG_DFL])
def test_a_handler_that_is_no_function_stays(handler: signal.Handlers) -> None:
    before = signal.signal(signal.SIGINT, handler)
    try:
        with DelayedInterrupt() as interrupt:
            assert signal.getsignal(signal.SIGINT) is handler
            assert interrupt.interruptible(lambda: 3) == 3
    finally:
        signal.signal(signal.SIGINT, before)


def test_another_thread_changes_nothing() -> None:
    seen: list[object] = []

    def run(look: Callable[[], object]) -> None:
        with DelayedInterrupt():
            seen.append(look())

    before = signal.getsignal(signal.SIGINT)
    thread = threading.Thread(target=run, args=(lambda: signal.getsignal(signal.SIGINT),))
    thread.start()
    thread.join()
    assert seen == [before]
