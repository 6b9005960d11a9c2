"""`FairExecutor`: users take turns, each user's jobs stay in order, and no job is lost."""

import threading
from concurrent.futures import Future
from functools import partial
from typing import Any

import pytest

from nanovllm.engine.engine_thread import FairExecutor
from tests.helpers import in_threads


def occupied(pool: FairExecutor) -> threading.Event:
    """Occupy the pool's one thread until the returned event is set."""
    is_running, may_end = threading.Event(), threading.Event()
    pool.submit("first", lambda: (is_running.set(), may_end.wait(20)))
    assert is_running.wait(20)
    return may_end


def test_users_take_turns() -> None:
    pool, order = FairExecutor(1, "test"), []
    may_go_on = occupied(pool)
    names = ("a1", "a2", "a3", "b1", "a4", "c1", "b2")
    jobs = [pool.submit(name[0], order.append, name) for name in names]
    may_go_on.set()
    for job in jobs:
        job.result(20)
    assert order == ["a1", "b1", "c1", "a2", "b2", "a3", "a4"]
    pool.shutdown()


def test_cancelled_and_failing_jobs_hold_up_nobody() -> None:
    pool, order = FairExecutor(1, "test"), []
    may_go_on = occupied(pool)
    cancelled = [pool.submit("a", order.append, "never") for _ in range(3)]
    failing: Future[Any] = pool.submit("a", lambda: 1 / 0)
    last = pool.submit("a", lambda: "last")
    assert all(job.cancel() for job in cancelled)
    may_go_on.set()
    with pytest.raises(ZeroDivisionError):
        failing.result(20)
    assert last.result(20) == "last"
    assert order == []
    pool.shutdown()


def test_what_was_submitted_before_the_end_still_runs() -> None:
    pool = FairExecutor(1, "test")
    may_go_on = occupied(pool)
    last = pool.submit("a", lambda: "last")
    pool.shutdown()
    with pytest.raises(RuntimeError):
        pool.submit("a", lambda: None)
    may_go_on.set()
    assert last.result(20) == "last"


def test_many_threads_run_each_job_once() -> None:
    pool, lock, done = FairExecutor(4, "test"), threading.Lock(), []

    def work(number: int) -> int:
        with lock:
            done.append(number)
        return number

    def submit(start: int) -> None:
        jobs = [pool.submit(str(n % 3), work, n) for n in range(start, 400, 4)]
        assert [job.result(20) for job in jobs] == list(range(start, 400, 4))

    assert in_threads([partial(submit, start) for start in range(4)]) == [None] * 4
    assert sorted(done) == list(range(400))
    assert pool._jobs == {}
    pool.shutdown()
