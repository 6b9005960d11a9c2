"""How commands of many threads run on one engine: their results and their errors."""

import logging
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from nanovllm.errors import log_failure

logger = logging.getLogger(__name__)

Result = TypeVar("Result")


def fulfil(future: Future[Result], function: Callable[[], Result]) -> None:
    """Give a future what a function returns or raises. If it was cancelled, do nothing."""
    if future.set_running_or_notify_cancel():
        try:
            future.set_result(function())
        except BaseException as error:  # a panic of a Rust library is no Exception
            future.set_exception(error)


def run_logged(command: Callable[[], object]) -> None:
    """Run a command; one that fails must not end the thread that runs it, nor keep the next."""
    try:
        command()
    except BaseException as error:
        log_failure(logger, error, "a command to the engine failed")
