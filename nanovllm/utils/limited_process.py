"""Starts programs in processes with limits on time and memory, which can be ended at any place.

Linux keeps the limits itself. On other systems a thread of the parent looks every few milliseconds,
so that a process may exceed them by a little, and what its start takes is allowed besides.

This file is the program of such a process, too. So it imports only the standard library at its top.
"""

import contextlib
import json
import os
import runpy
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import NoReturn

IN_KERNEL = sys.platform == "linux"
OUT_OF_MEMORY = 3  # exit status
_LOOK_SECONDS = 0.01
_START_SECONDS = 5.0
_START_BYTES = 256 * 2**20


def start(program: str, replies: int = subprocess.PIPE) -> "subprocess.Popen[bytes]":
    """Run `main(limits, requests, replies)` of file `program` in a process of its own.

    `requests` and `replies` are its standard input, a pipe, and its standard output. Ctrl-C in a
    terminal is not for it.
    """
    from nanovllm.utils.system import own_session  # the process itself does without

    paths = json.dumps([path for path in sys.path if path])
    return subprocess.Popen(
        [sys.executable, "-I", "-S", __file__, program, paths],
        stdin=subprocess.PIPE,
        stdout=replies,
        stderr=subprocess.DEVNULL,
        **own_session(),
    )


class Watch:
    """Ends a process that takes more than `seconds` of processor time from now on, or `num_bytes`.

    As a context: it watches for that long.
    """

    def __init__(self, process: "subprocess.Popen[bytes]", seconds: float, num_bytes: int) -> None:
        self._process = process
        self._seconds = seconds
        self._num_bytes = num_bytes
        self._done = threading.Event()
        self._reached = ""
        self._thread = threading.Thread(target=self._look, name="limits", daemon=True)

    def __enter__(self) -> "Watch":
        if not IN_KERNEL:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        if not IN_KERNEL:
            self._thread.join()

    def reached(self, exit_status: int | None) -> str:
        """Return which limit ended the process: "time", "memory", or "" for none."""
        if sys.platform != "win32" and exit_status == -signal.SIGPROF:
            return "time"
        return "memory" if exit_status == OUT_OF_MEMORY else self._reached

    def _look(self) -> None:
        import psutil

        with contextlib.suppress(psutil.Error):  # it has ended
            process = psutil.Process(self._process.pid)
            last = sum(process.cpu_times()[:2]) + self._seconds + _START_SECONDS
            most = self._num_bytes + _START_BYTES
            while not self._done.wait(_LOOK_SECONDS):
                if process.memory_info().rss > most:
                    self._reached = "memory"
                elif sum(process.cpu_times()[:2]) > last:
                    self._reached = "time"
                if self._reached:
                    self._process.kill()
                    return


class Limits:
    """What a program sets in its own process. Where the system lacks a limit, `Watch` stands in."""

    def memory(self, num_bytes: int, stack: int | None = None) -> None:
        """Allow this many bytes more than now. Behind them an allocation is a MemoryError."""
        if sys.platform == "linux":
            import resource

            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            with open("/proc/self/statm", encoding="utf-8") as file:
                most = int(file.read().split()[0]) * resource.getpagesize() + num_bytes
            with contextlib.suppress(ValueError, OSError):  # there is a lower one
                resource.setrlimit(resource.RLIMIT_AS, (most, most))
            if stack is not None:
                hard = resource.getrlimit(resource.RLIMIT_STACK)[1]
                resource.setrlimit(resource.RLIMIT_STACK, (stack, hard))
            signal.signal(signal.SIGPROF, signal.SIG_DFL)  # ends it, whatever it is doing
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGPROF])

    def out_of_memory(self) -> NoReturn:
        """End the process, with the status that says why."""
        os._exit(OUT_OF_MEMORY)

    @contextlib.contextmanager
    def time(self, seconds: float) -> Iterator[None]:
        """Allow this many seconds of processor time to what the context does."""
        if sys.platform == "linux":
            signal.setitimer(signal.ITIMER_PROF, seconds)
        try:
            yield
        finally:
            if sys.platform == "linux":
                signal.setitimer(signal.ITIMER_PROF, 0)


if __name__ == "__main__":
    _, _program, _paths = sys.argv
    sys.path[:] = json.loads(_paths)
    runpy.run_path(_program)["main"](Limits(), sys.stdin.buffer, sys.stdout.buffer)
