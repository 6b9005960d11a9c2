"""An engine that answers rows: one that dies is made new, and its rows are computed again.

Each body goes to the server's own app, without a socket. What changes from run to run, such as ids
and times, is replaced, so that the same row has the same output.
"""

import asyncio
import dataclasses
import logging
import re
from typing import Any

import httpx

from nanovllm import __version__
from nanovllm.apps.batch.batch_options import RowOptions
from nanovllm.apps.batch.rows import (
    DIED,
    ROW,
    InputRow,
    dumps,
    error_body,
    failed_line,
    openai_failure,
    openai_line,
    row_seed,
    short_digest,
)
from nanovllm.apps.server.app import make_app
from nanovllm.apps.server.server_options import AnswerOptions, ServerOptions
from nanovllm.async_llm import AsyncLLM
from nanovllm.errors import EngineDeadError, log_failure
from nanovllm.options.validation import did_you_mean, shown

logger = logging.getLogger(__name__)

MAX_DEATHS = 5
"""A row gets an error after this many engines have died while they had it."""
_SAMPLES = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
URLS = (*_SAMPLES, "/v1/embeddings", "/v1/score", "/v1/rerank")
_FIELDS = ("custom_id", "method", "url", "body")
_LATER = (429, 503)
"""Statuses that ask the client to retry: how busy an engine is must not decide a row."""
_ATTEMPTS = 5
_RANDOM_ID = re.compile(r"\A([a-z]+(?:-tool)?[-_])[0-9a-f]{24,32}\Z")
_ID_KEYS = ("id", "call_id", "item_id")
_CACHE_KEYS = ("cached_tokens", "cache_write_tokens")
_TIME_KEYS = ("created", "created_at", "completed_at")


class RowEngine:
    """Answers rows with an engine of this process.

    Raises:
        NanoVLLMError: the engine cannot be made.
    """

    def __init__(self, options: RowOptions) -> None:
        self._options = options
        self._app = self._make()
        self._renewing = asyncio.Lock()
        self._num_deaths = 0  # since a row was finished
        self.capacity = 2 * self._app.llm.engine.config.max_num_seqs
        """How many rows to give it at once: as many wait as run."""

    async def start(self) -> None:
        """Do nothing: the engine is ready once this object is made."""

    async def answer(self, row: InputRow) -> bytes:
        """Return the output of a row as a line of JSON.

        Raises:
            EngineDeadError: one engine after another dies and none finishes a row.
        """
        for _ in range(MAX_DEATHS):
            app = self._app
            try:
                output = await app.answer(row)
            except EngineDeadError as error:
                await self._renew(app, error)
            except Exception as error:  # of a template, of a tokenizer: the other rows go on
                log_failure(logger, error, f"row {row.number} failed")
                return failed_line(row, f"{type(error).__name__}: {error}")
            else:
                self._num_deaths = 0
                return dumps(output)
        return failed_line(row, DIED)

    def close(self) -> None:
        """End the engine."""
        self._app.llm.shutdown()

    async def _renew(self, dead: "RowApp", error: EngineDeadError) -> None:
        """Make a new engine, unless one has been made."""
        async with self._renewing:
            if self._app is not dead:
                return
            self._num_deaths += 1
            if self._num_deaths >= MAX_DEATHS:
                raise EngineDeadError(f"{MAX_DEATHS} engines died before a row was done: {error}")
            logger.warning("the engine died, a new one is made: %s", error)
            dead.llm.shutdown()
            self._app = await asyncio.to_thread(self._make)

    def _make(self) -> "RowApp":
        llm = AsyncLLM(self._options.model, **self._options.engine_options)
        try:
            return RowApp(llm, self._options)
        except BaseException:  # an adapter cannot be used
            llm.shutdown()
            raise


class RowApp:
    """The server's app on one engine, which answers the bodies of rows."""

    def __init__(self, llm: AsyncLLM, options: RowOptions) -> None:
        self.llm = llm
        self._seed = llm.engine.config.seed  # from which, with its id, a row's seed is made
        names = [field.name for field in dataclasses.fields(AnswerOptions)]
        served = ServerOptions(
            **{name: getattr(options.batch, name) for name in names},
            max_waiting=2**20,
            max_body_bytes=2**30,
            read_timeout=1e6,
        )
        self._client = httpx.AsyncClient(
            transport=httpx.ASGITransport(make_app(llm, served)),
            base_url="http://localhost",
            headers={"content-type": "application/json"},
            timeout=None,
        )

    async def answer(self, row: InputRow) -> dict[str, Any]:
        """Return a line of the output; it has an error if the row is bad.

        Raises:
            EngineDeadError: the engine is down.
        """
        problem = row.problem or problem_of(row.fields)
        if problem is not None:
            return openai_failure(row, 400, error_body(problem))
        body = dict(row.fields["body"])
        url = row.fields["url"]
        if url in _SAMPLES and body.get("seed") in (None, -1):  # the body has no seed
            body["seed"] = row_seed(self._seed, row.fields["custom_id"])
        for attempt in range(1, _ATTEMPTS + 1):
            response = await self._client.post(url, content=dumps(body))
            status = response.status_code
            answer = response.json()
            if status not in _LATER or attempt == _ATTEMPTS:
                break
            await asyncio.sleep(1)
        error = answer.get("error") if status >= 400 else None
        if error is None:
            return openai_line(row, status, _Repeatable(row).value(answer), None)
        if error.get("code") == "engine_dead":
            raise EngineDeadError(error["message"])
        return openai_failure(row, status, answer)


def problem_of(fields: dict[str, Any]) -> str | None:
    """Return what is wrong with a row around its body."""
    if "body" not in fields:
        return f"a row needs a body, as in {ROW}"
    for name in sorted(fields.keys() - set(_FIELDS)):
        return f"a row has no field {shown(name)}{did_you_mean(name, _FIELDS)}"
    custom_id = fields.get("custom_id")
    body = fields["body"]
    if not isinstance(custom_id, str) or not custom_id:
        return f"custom_id must be a string that is not empty, got {shown(custom_id)}"
    if fields.get("method", "POST") != "POST":
        return f"method must be POST, got {shown(fields['method'])}"
    if fields.get("url") not in URLS:
        return f"url must be one of {', '.join(URLS)}, got {shown(fields.get('url'))}"
    if not isinstance(body, dict):
        return f"body must be an object, got {shown(body)}"
    if body.get("stream"):
        return "stream must be false: a batch has whole answers"
    return None


class _Repeatable:
    """Replaces what is not the same in each run: random ids, times, and what a cache had."""

    def __init__(self, row: InputRow) -> None:
        self._base = f"{row.number} {row.fields['custom_id']}"
        self._ids: dict[str, str] = {}

    def value(self, value: Any) -> Any:
        """Return a JSON value with replacements."""
        if isinstance(value, list):
            return [self.value(item) for item in value]
        if not isinstance(value, dict):
            return value
        return {name: self._field(name, item) for name, item in value.items()}

    def _field(self, name: str, value: Any) -> Any:
        if name in _TIME_KEYS and isinstance(value, int | float):
            return 0
        if name in _CACHE_KEYS and isinstance(value, int):
            return 0
        if name == "system_fingerprint":
            return f"nanovllm-{__version__}"
        if name in _ID_KEYS and isinstance(value, str) and (found := _RANDOM_ID.match(value)):
            number = len(self._ids)
            new = found[1] + short_digest(self._base, number)[: len(value) - len(found[1])]
            return self._ids.setdefault(value, new)
        return self.value(value)
