"""The steps that are left when no sequence is: with a byte store below the pool, one of them begins
to write what the last request left. Knows no tier.
"""

import logging

from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.errors import EngineDeadError

logger = logging.getLogger(__name__)


def run_last_steps(engine: LLMEngine) -> None:
    """Run these steps, none while a sequence is unfinished. An error is logged: the callers have
    their outputs.
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
