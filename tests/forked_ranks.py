"""Ranks forked from a process that has imported what they need, for tests of what ranks compute.

Spawning one takes two seconds of CPU time more: test_tensor_parallel.py has real ones.
"""

import contextlib
import functools
import multiprocessing
import os
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from types import SimpleNamespace
from typing import Any
from unittest import mock


@contextlib.contextmanager
def forked_ranks() -> Iterator[None]:
    """Have engines that are made inside fork their ranks.

    These do not get what this process has changed in its environment.
    """
    get_context, server = multiprocessing.get_context, multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(["torch", "nanovllm.parallel.rank_process"])

    def make_process(target: Callable[..., None], **options: Any) -> BaseProcess:
        return server.Process(target=functools.partial(_run, target), **options)

    def get(method: str | None = None) -> Any:
        if method != "spawn":
            return get_context(method)
        return SimpleNamespace(Pipe=server.Pipe, Process=make_process)

    with mock.patch("multiprocessing.get_context", get):
        yield


def _run(target: Callable[..., None], *args: Any) -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    os.getppid = lambda: parent.pid or 0  # a rank ends when it has another parent
    target(*args)
