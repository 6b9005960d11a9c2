"""A forked process keeps no end of its parent's pipes; the control groups that limit a process."""

import gc
import multiprocessing
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nanovllm.chat.template_process import TemplateProcess
from nanovllm.utils import process
from nanovllm.utils.process import call_in_forked
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
    child = renders._process._process
    assert child is not None
    assert child.stdin is not None
    forks()
    assert renders.render("{{ x }}", {"x": 2}) == "2"
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, child.stdin.fileno())  # closes the pipe, as if this process had ended
    os.close(null)
    wait_until(lambda: child.poll() is not None, 5)


SERVICE = ["system.slice/nanovllm.service", "system.slice", ""]


@pytest.mark.parametrize(
    ("own", "expected"),
    [
        ("0::/system.slice/nanovllm.service\n", [*SERVICE, "memory"]),
        (
            "5:cpu,cpuacct:/other\n4:memory:/docker/ab\n0::/\n",
            ["", "memory/docker/ab", "memory/docker", "memory"],
        ),
        ("0::/../../user.slice\n", ["", "memory"]),
        (None, ["", "memory"]),
    ],
    ids=["systemd", "version 1", "outside of the namespace", "no cgroups"],
)
def test_a_limit_of_each_group_up_to_the_root_counts(
    own: str | None, expected: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Symptom: MemoryMax of a systemd unit was not seen, and the KV pool was as for the machine."""
    file = tmp_path / "cgroup"
    if own is not None:
        file.write_text(own)
    monkeypatch.setattr(process, "_OWN", file)
    assert process.control_groups("memory") == [process._ROOT / path for path in expected]
