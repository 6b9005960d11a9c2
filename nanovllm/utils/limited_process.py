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
import weakref
from collections.abc import Callable, Iterator
from typing import IO, Any, NoReturn

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


class LimitError(Exception):
    """A process was ended by a limit, or ended by itself; the message says which."""


class LimitedProcess:
    """Answers requests in a process, one at a time. It is started when first needed.

    A request that reaches a limit ends the process; the next one gets a new one.

    Args:
        program: a file whose `main` calls `Limits.serve`.
        seconds, num_bytes: limits of a request: processor time, and memory besides what the
            program's imports take.
    """

    def __init__(self, program: str, seconds: float, num_bytes: int) -> None:
        from nanovllm.utils.process import call_in_forked  # the process itself does without

        self._program = program
        self._seconds = seconds
        self._num_bytes = num_bytes
        self._owner = os.getpid()
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._finalizer: weakref.finalize[..., Any] | None = None
        call_in_forked(self._let_go)

    @property
    def is_forked(self) -> bool:
        """Whether this process was forked from the one that made this object."""
        return os.getpid() != self._owner

    def ask(self, request: bytes) -> bytes:
        """Return the answer to a request.

        Raises:
            LimitError: a limit has ended the process, or it cannot start, or this process was
                forked from the one that made this object.
        """
        if self.is_forked:
            raise LimitError("this process was forked after the model was loaded")
        with self._lock:
            process = self._running()
            reply = None
            try:
                with (
                    Watch(process, self._seconds, self._num_bytes) as watch,
                    contextlib.suppress(OSError),  # it has ended: there is no reply
                ):
                    _write_frame(process.stdin, request)
                    reply = _read_frame(process.stdout)
            except BaseException:  # Ctrl-C: its reply would be taken for that to the next request
                self._stop()
                raise
            if reply is None:
                status = self._stop()
                raise LimitError(self._cause(watch.reached(status), status))
            return reply

    def shutdown(self) -> None:
        """End the process. A later request starts a new one. A forked process changes nothing."""
        if not self.is_forked:
            with self._lock:
                self._stop()

    def _let_go(self) -> None:
        """Give up the pipes of a forked process. The process would live as long as that does."""
        if self._process is not None:
            null = os.open(os.devnull, os.O_RDWR)
            for pipe in (self._process.stdin, self._process.stdout):
                assert pipe is not None
                os.dup2(null, pipe.fileno(), inheritable=False)  # what is buffered goes nowhere
            os.close(null)

    def _running(self) -> "subprocess.Popen[bytes]":
        """Return the process; start one if there is none, or if it has ended."""
        if self._process is not None and self._process.poll() is None:
            return self._process
        self._stop()
        try:
            self._process = start(self._program)
        except OSError as error:
            raise LimitError(f"cannot start a process for it: {error}") from error
        self._finalizer = weakref.finalize(self, _end, self._process, self._owner)
        return self._process

    def _stop(self) -> int | None:
        """End the process and return its exit status; None if there is none."""
        self._process = None
        return self._finalizer() if self._finalizer is not None else None

    def _cause(self, limit: str, exit_status: int | None) -> str:
        """Return why the process has ended in the middle of a request."""
        if limit == "time":
            return f"it takes more than {self._seconds:g} s of processor time"
        if limit == "memory":
            return f"it takes more than {self._num_bytes >> 20} MiB of memory"
        return f"its process ended with status {exit_status}"


def _end(process: "subprocess.Popen[bytes]", owner: int) -> int | None:
    if os.getpid() == owner:  # a forked process would wait for what is not its child
        process.kill()
        process.communicate()
    return process.returncode


def _write_frame(file: IO[bytes] | None, data: bytes) -> None:
    assert file is not None  # a pipe
    file.write(len(data).to_bytes(8, "little") + data)
    file.flush()


def _read_frame(file: IO[bytes] | None) -> bytes | None:
    """Return the next message; None at the end of the file."""
    assert file is not None
    head = file.read(8)
    data = file.read(int.from_bytes(head, "little")) if len(head) == 8 else b""
    return data if len(head) == 8 and len(data) == int.from_bytes(head, "little") else None


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

    def serve(
        self,
        requests: IO[bytes],
        replies: IO[bytes],
        seconds: float,
        answer: Callable[[bytes], bytes],
    ) -> None:
        """Answer the requests of a `LimitedProcess` until there are no more."""
        while (request := _read_frame(requests)) is not None:
            try:
                with self.time(seconds):
                    reply = answer(request)
            except MemoryError:
                self.out_of_memory()
            _write_frame(replies, reply)

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
