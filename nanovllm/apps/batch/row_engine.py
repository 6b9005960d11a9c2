"""An engine that answers rows: one that dies is made new, and its rows are computed again."""

import asyncio
import importlib.util
import logging
from typing import TYPE_CHECKING

from nanovllm.apps.batch.batch_options import RowOptions
from nanovllm.apps.batch.rows import OPENAI, InputRow, dumps, failed_line
from nanovllm.errors import ConfigError, EngineDeadError, log_failure

if TYPE_CHECKING:
    from nanovllm.apps.batch.openai_rows import OpenAIRows
    from nanovllm.apps.batch.plain_rows import PlainRows
    from nanovllm.async_llm import AsyncLLM

    Form = OpenAIRows | PlainRows

logger = logging.getLogger(__name__)

MAX_DEATHS = 5
"""After so many engines have died with a row in them, the row gets an error."""


class RowEngine:
    """Answers rows with an engine of this process.

    Raises:
        NanoVLLMError: the engine cannot be made.
    """

    def __init__(self, options: RowOptions) -> None:
        self._options = options
        self._llm, self._form = self._make()
        self._renewing = asyncio.Lock()
        self._num_deaths = 0  # since a row was finished
        self.capacity = 2 * self._llm.engine.config.max_num_seqs
        """How many rows to give it at once: as many wait as run."""

    async def start(self) -> None:
        """Do nothing: the engine is ready once this object is made."""

    async def answer(self, row: InputRow) -> bytes:
        """Return the output of a row as a line of JSON.

        Raises:
            EngineDeadError: one engine after another dies and none finishes a row.
        """
        for _ in range(MAX_DEATHS):
            form = self._form
            try:
                output = await form.answer(row)
            except EngineDeadError as error:
                await self._renew(form, error)
            except Exception as error:  # of a template, of a tokenizer: the other rows go on
                log_failure(logger, error, f"row {row.number} failed")
                return failed_line(self._options.form, row, f"{type(error).__name__}: {error}")
            else:
                self._num_deaths = 0
                return dumps(output)
        return failed_line(self._options.form, row, DIED)

    def close(self) -> None:
        """End the engine."""
        self._llm.shutdown()

    async def _renew(self, dead: "Form", error: EngineDeadError) -> None:
        """Make a new engine, unless one has been made."""
        async with self._renewing:
            if self._form is not dead:
                return
            self._num_deaths += 1
            if self._num_deaths >= MAX_DEATHS:
                raise EngineDeadError(f"{MAX_DEATHS} engines died before a row was done: {error}")
            logger.warning("the engine died, a new one is made: %s", error)
            self._llm.shutdown()
            self._llm, self._form = await asyncio.to_thread(self._make)

    def _make(self) -> "tuple[AsyncLLM, Form]":
        check_form(self._options.form)
        from nanovllm.async_llm import AsyncLLM

        llm = AsyncLLM(self._options.model, **self._options.engine_options)
        try:
            return llm, self._make_form(llm)
        except BaseException:  # an adapter cannot be used
            llm.shutdown()
            raise

    def _make_form(self, llm: "AsyncLLM") -> "Form":
        if self._options.form == OPENAI:
            from nanovllm.apps.batch.openai_rows import OpenAIRows

            return OpenAIRows(llm, self._options)
        from nanovllm.apps.batch.plain_rows import PlainRows

        return PlainRows(llm, self._options)


DIED = "one engine after another died while it computed this row"


def check_form(form: str) -> None:
    """Raise ConfigError if a package is missing that rows of this form need."""
    if form == OPENAI and importlib.util.find_spec("fastapi") is None:
        raise ConfigError(
            "OpenAI's batch format needs the server's routes: "
            "pip install -e '.[server]' -c constraints.txt"
        )
