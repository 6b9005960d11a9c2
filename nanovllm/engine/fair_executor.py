"""`FairExecutor`: a pool of threads in which users take turns."""

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from nanovllm.engine.commands import fulfil

T = TypeVar("T")


class FairExecutor:
    """Runs functions in threads; a user with many jobs does not hold up another with one.

    A job waits for its user's earlier jobs, and for one job of each other user
    between any two of those. Within a user, jobs begin in the order in which they came.
    """

    def __init__(self, num_threads: int, name: str) -> None:
        self._pool = ThreadPoolExecutor(num_threads, name)
        self._lock = threading.Lock()
        # By user; the users in the order of their turns. None has no job.
        self._jobs: dict[str, deque[tuple[Future[Any], Callable[[], Any]]]] = {}

    def submit(self, user: str, function: Callable[..., T], *args: Any) -> Future[T]:
        """Run a function when it is its user's turn.

        Raises:
            RuntimeError: the executor was shut down.
        """
        future: Future[T] = Future()
        with self._lock:
            self._pool.submit(self._run_next)
            self._jobs.setdefault(user, deque()).append((future, partial(function, *args)))
        return future

    def shutdown(self) -> None:
        """Take no more jobs. Those that were submitted still run; this does not wait for them."""
        self._pool.shutdown(wait=False)

    def _run_next(self) -> None:
        with self._lock:
            user = next(iter(self._jobs))
            jobs = self._jobs.pop(user)
            future, function = jobs.popleft()
            if jobs:
                self._jobs[user] = jobs  # after the others
        fulfil(future, function)
