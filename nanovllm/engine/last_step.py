"""What a thread that runs an engine runs beside the steps of sequences. Knows no tier."""

import logging
from collections.abc import Callable, Iterable
from functools import partial

from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.errors import EngineDeadError

logger = logging.getLogger(__name__)


def run_last_steps(engine: LLMEngine) -> None:
    """Run the steps that are left when no sequence is. An error is logged: the callers have their
    outputs.

    With a byte store below the pool, one of them begins to write what the last request left.
    """
    scheduler = engine.scheduler
    try:
        # If steps are in flight, the first calls end them.
        while scheduler.num_unfinished and not has_sequences(engine):
            engine.run_step()
    except EngineDeadError:  # whoever needs the engine is told
        logger.debug("the engine ended before the step behind the last request")
    except Exception:
        logger.exception("the step behind the last request failed")


def has_sequences(engine: LLMEngine) -> bool:
    """Return whether a sequence is unfinished."""
    return bool(engine.scheduler.running or engine.scheduler.num_waiting)


def run_logged(command: Callable[[], object]) -> None:
    """Run a command; one that fails must not end the thread that runs it, nor keep the next."""
    try:
        command()
    except BaseException:
        logger.exception("a command to the engine failed")


def abort_all(engine: LLMEngine, request_ids: Iterable[int | str]) -> None:
    """Abort requests; one that fails stops none."""
    for request_id in request_ids:
        run_logged(partial(engine.abort, request_id))
