"""A forked process keeps no end of its parent's pipes."""

import gc
import multiprocessing
import os
import signal
from collections.abc import Callable
from typing import Any

import pytest

from nanovllm.chat.template_process import TemplateProcess
from nanovllm.utils.forked import call_in_forked
from tests.helpers import wait_until


@pytest.fixture
def forks() -> Any:
    """Return a function that forks a process, which does nothing until the test ends."""
    made = []

    def fork() -> None:
        pid = os.fork()
        if not pid:
            signal.pause()
        made.append(pid)

    yield fork
    for pid in made:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


class Owner:
    def __init__(self) -> None:
        self.pipe, self.other_end = multiprocessing.Pipe()
        call_in_forked(self.close)

    def close(self) -> None:
        self.pipe.close()


def test_the_other_end_sees_that_the_owner_is_gone(forks: Callable[[], None]) -> None:
    owner = Owner()
    forks()
    owner.pipe.send(1)  # a fork changes nothing here
    assert owner.other_end.recv() == 1
    owner.close()
    assert owner.other_end.poll(5)
    with pytest.raises(EOFError):
        owner.other_end.recv()


def test_an_object_that_is_gone_is_not_called(forks: Callable[[], None]) -> None:
    called, told = os.pipe()

    class Writes:
        def write(self) -> None:
            os.write(told, b"x")

    writes, gone = Writes(), Writes()
    call_in_forked(writes.write)
    call_in_forked(gone.write)
    del gone
    gc.collect()
    forks()
    assert os.read(called, 9) == b"x"
    del writes
    os.close(told)
    os.close(called)


def test_what_renders_templates_ends_with_its_owner(forks: Callable[[], None]) -> None:
    renders = TemplateProcess()
    assert renders.render("{{ x }}", {"x": 1}) == "1"
    process = renders._process
    assert process is not None
    assert process.stdin is not None
    forks()
    assert renders.render("{{ x }}", {"x": 2}) == "2"
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, process.stdin.fileno())  # closes the pipe, as if this process had ended
    os.close(null)
    wait_until(lambda: process.poll() is not None, 5)
