"""Which models are in memory: loads one when a request needs it, and lets the idle ones go.

Of HTTP it knows only the errors that it raises. All of it runs in the event loop's thread.
"""

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from nanovllm.apps.router.engine import EngineProcess
from nanovllm.apps.router.router_options import ModelSpec, RouterOptions
from nanovllm.apps.server.admission import AdmissionControl, shutting_down
from nanovllm.apps.server.error_bodies import APIError, unknown_model
from nanovllm.apps.server.info_route import may_chat
from nanovllm.apps.server.request_log import Log
from nanovllm.apps.server.server_options import ServerOptions
from nanovllm.options.validation import shown
from nanovllm.utils.terminal import complain

_RETRY_SECONDS = 5.0
"""After a load that failed, requests get its error for so long; then they try again."""
_STABLE_SECONDS = 10.0
"""An engine that lived so long is started again at once when it dies."""
_SLACK = 1e-6


class Model:
    """One model, and what is known of its engine now."""

    def __init__(self, spec: ModelSpec) -> None:
        self.spec = spec
        self.name = spec.names[0]
        self.state = "unloaded"
        """Or "loading", "loaded", "unloading" or "sleeping"."""
        self.engine: EngineProcess | None = None
        self.chats = may_chat(spec.model, has_template="chat_template" in spec.server)
        self.cards: list[dict[str, Any]] = []
        """What its engine lists at /v1/models; kept while it is not loaded."""
        self.has_room = False
        self.is_leaving = False
        """Whether it goes when its requests have ended; new ones wait until it is back."""
        self.num_requests = 0
        self.waiters: dict[asyncio.Future[EngineProcess], None] = {}
        """Requests that wait for the engine, the oldest first."""
        self.idle = asyncio.Event()
        """Set while no request uses the engine."""
        self.idle.set()
        self.last_used = 0.0
        self.loaded_at = 0.0
        self.load_seconds = 0.0
        self.wake_seconds = 0.0
        self.num_loads = 0
        self.num_deaths = 0
        self.failure: str | None = None
        """Why the last load failed, or the engine died."""
        self.retry_at = 0.0
        self.loading: asyncio.Task[None] | None = None
        self.timer: asyncio.TimerHandle | None = None
        self.changing = asyncio.Lock()

    @property
    def is_open(self) -> bool:
        """Whether a request may use the engine now."""
        return self.state == "loaded" and self.is_alive and not self.is_leaving

    @property
    def is_alive(self) -> bool:
        """Whether its engine has a process."""
        return self.engine is not None and self.engine.is_alive


class Models:
    """The models of a server, by name.

    A model has a share of memory while it is loaded, and all shares together are at most 1. Who
    needs room waits for its turn; the model that was used least recently makes room, idle ones
    first. It sleeps, unless it loads faster than it wakes up: then its process ends.

    Args:
        directory: for sockets; only this user may enter it.
    """

    def __init__(
        self,
        specs: Iterable[ModelSpec],
        options: ServerOptions,
        router: RouterOptions,
        directory: str,
        log: Log,
    ) -> None:
        self.all = [Model(spec) for spec in specs]
        self.by_name = {
            name: model for model in self.all for name in (*model.spec.names, *model.spec.adapters)
        }
        for model in self.all:
            self.by_name.setdefault(model.spec.model, model)
        self.admission = AdmissionControl(
            options.max_waiting, lambda: self.admission.num_active, options.read_timeout
        )
        """All requests that engines answer. Here none waits for its turn, only for its model."""
        self.log = log
        self._options = options
        self._router = router
        self._directory = directory
        self._numbers = itertools.count()
        self._room = asyncio.Lock()
        self._changed = asyncio.Event()
        self._tasks: set[asyncio.Task[Any]] = set()

    def find(self, name: str | None) -> Model:
        """Return the model that a request names; None or "" is the first.

        Raises:
            APIError: status 404: there is no such model.
        """
        if not name:
            return self.all[0]
        if (model := self.by_name.get(name)) is not None:
            return model
        names = [name for each in self.all for name in (*each.spec.names, *each.spec.adapters)]
        raise unknown_model(name, names)

    def answering(self, name: str | None = None) -> list[Model]:
        """Return the models whose engines can be asked now, at most the named one; load none.

        Raises:
            APIError: status 404: there is no such model.
        """
        named = [self.find(name)] if name else self.all
        return [each for each in named if each.is_alive and each.state in ("loaded", "sleeping")]

    def in_memory(self, name: str | None) -> Model:
        """Return the first of `answering`; raise APIError, status 503, if there is none."""
        if found := self.answering(name):
            return found[0]
        which = f"the model {shown(name)} is not" if name else "no model is"
        reason = f"{which} loaded, and this request loads none: send one with a body in JSON first"
        raise APIError(503, reason, code="no_model_loaded")

    @asynccontextmanager
    async def use(self, model: Model) -> AsyncIterator[EngineProcess]:
        """Yield a model's engine once it is loaded, and keep it loaded until the block ends.

        Raises:
            APIError: status 500, it cannot be loaded; status 503, that takes too long, or too many
                wait for it.
        """
        engine = await self._enter(model)
        try:
            yield engine
        finally:
            self._leave(model)

    async def _enter(self, model: Model) -> EngineProcess:
        if model.is_open:
            assert model.engine is not None
            self._begin(model)
            return model.engine
        if model.failure is not None and time.monotonic() < model.retry_at:
            raise _cannot_load(model)
        if len(model.waiters) >= model.spec.server.get("max_waiting", self._options.max_waiting):
            reason = f"{len(model.waiters)} requests wait for {model.name!r}; try again later"
            raise APIError(503, reason, code="queue_full", headers={"Retry-After": "5"})
        waiter: asyncio.Future[EngineProcess] = asyncio.get_running_loop().create_future()
        model.waiters[waiter] = None
        self._load_soon(model)
        try:
            async with asyncio.timeout(self._router.load_timeout):
                return await waiter
        except TimeoutError:
            self._forget(model, waiter)
            reason = f"{model.name!r} was not loaded within {self._router.load_timeout:g} s"
            raise APIError(
                503,
                f"{reason}; try again later",
                code="model_loading",
                headers={"Retry-After": "5"},
            ) from None
        except BaseException:  # the client has gone, or the load failed
            self._forget(model, waiter)
            raise

    def _forget(self, model: Model, waiter: "asyncio.Future[EngineProcess]") -> None:
        model.waiters.pop(waiter, None)
        if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
            self._leave(model)

    def _begin(self, model: Model) -> None:
        model.num_requests += 1
        model.idle.clear()
        if model.timer is not None:
            model.timer.cancel()
            model.timer = None

    def _leave(self, model: Model) -> None:
        model.num_requests -= 1
        model.last_used = time.monotonic()
        if model.num_requests == 0:
            model.idle.set()
            self._start_timer(model)

    def _start_timer(self, model: Model) -> None:
        """Let the model go when it has been idle for `keep_alive`."""
        seconds = self._router.keep_alive_seconds
        if model.state == "loaded" and seconds != float("inf"):
            loop = asyncio.get_running_loop()
            model.timer = loop.call_later(seconds, lambda: self._spawn(self._unload(model)))

    def _load_soon(self, model: Model) -> None:
        if model.loading is None and not self.admission.is_draining:
            model.loading = self._spawn(self._load(model))

    def _spawn(self, coroutine: Any) -> "asyncio.Task[Any]":
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _load(self, model: Model) -> None:
        """Load the model or wake it up, and give its engine to those that wait."""
        try:
            async with self._room:
                await self._make_room(model)
                model.has_room = True
            async with model.changing:
                if model.state != "loaded" or not model.is_alive:
                    async with asyncio.timeout(self._router.load_timeout):
                        await self._bring_up(model)
        except TimeoutError:
            limit = self._router.load_timeout
            await self._give_up(model, f"it was not loaded within {limit:g} s")
            return
        except Exception as error:  # whatever it is, those that wait are told
            await self._give_up(model, str(error))
            return
        finally:
            model.loading = None
        assert model.engine is not None
        model.failure = None
        model.last_used = time.monotonic()
        waiters, model.waiters = model.waiters, {}
        for waiter in waiters:
            if not waiter.done():
                self._begin(model)
                waiter.set_result(model.engine)
        if model.num_requests == 0:
            self._start_timer(model)

    async def _give_up(self, model: Model, reason: str) -> None:
        model.failure = reason
        model.retry_at = time.monotonic() + _RETRY_SECONDS
        engine, model.engine = model.engine, None
        if engine is not None:
            await engine.stop()
        self._set(model, "unloaded", has_room=False)
        self.log.tell(f"nanovllm: {model.name} cannot be loaded: {reason}")
        waiters, model.waiters = model.waiters, {}
        for waiter in waiters:
            if not waiter.done():
                waiter.set_exception(_cannot_load(model))

    async def _make_room(self, model: Model) -> None:
        """Wait until the model's share of memory is free; let others go for it."""
        while True:
            others = [each for each in self.all if each.has_room and each is not model]
            if sum(each.spec.share for each in others) + model.spec.share <= 1 + _SLACK:
                return
            loaded = [each for each in others if each.state == "loaded"]
            if loaded:
                await self._unload(
                    min(loaded, key=lambda each: (each.num_requests > 0, each.last_used))
                )
            else:
                self._changed.clear()
                await self._changed.wait()

    async def _bring_up(self, model: Model) -> None:
        start = time.monotonic()
        if model.state == "sleeping" and model.engine is not None:
            self._set(model, "loading")
            if await model.engine.call("/wake_up", self._router.load_timeout):
                model.wake_seconds = time.monotonic() - start
                self._set(model, "loaded")
                self.log.tell(f"nanovllm: {model.name} is awake after {model.wake_seconds:.2f} s")
                return
            await model.engine.stop()
        self._set(model, "loading")
        path = str(Path(self._directory) / str(next(self._numbers)))
        engine = EngineProcess(
            model.spec.words(), path, self._options.api_keys, lambda line: self._tell(model, line)
        )
        await engine.start()
        model.engine = engine
        self._spawn(self._watch(model, engine))
        await engine.wait_until_ready()
        model.cards = (await engine.client.get("/v1/models")).json().get("data", [])
        model.num_loads += 1
        model.loaded_at = time.monotonic()
        model.load_seconds = model.loaded_at - start
        self._set(model, "loaded")

    async def _unload(self, model: Model) -> None:
        """Let a loaded model go once its requests have ended; new ones wait until it is back."""
        async with model.changing:
            engine = model.engine
            if model.state != "loaded" or engine is None:
                return
            model.is_leaving = True
            try:
                await model.idle.wait()
                if model.state != "loaded":  # it died meanwhile
                    return
                self._set(model, "unloading")
                is_worth_it = not model.wake_seconds > model.load_seconds
                if is_worth_it and await engine.call(
                    "/sleep?level=1&mode=wait", self._router.load_timeout
                ):
                    self._set(model, "sleeping", has_room=False)
                else:
                    model.engine = None
                    await engine.stop()
                    self._set(model, "unloaded", has_room=False)
                self.log.tell(f"nanovllm: {model.name} is {model.state}")
            finally:
                model.is_leaving = False
        if model.waiters:
            self._load_soon(model)

    async def _watch(self, model: Model, engine: EngineProcess) -> None:
        """When an engine dies by itself, free its place, and start it again if it was of use."""
        reason = await engine.ended()
        if engine.is_stopping or (model.engine is engine and model.state == "loading"):
            return  # who loads it sees it
        model.num_deaths += 1
        self.log.tell(f"nanovllm: the engine of {model.name} has died: {reason}")
        if model.engine is not engine:  # another has its place already
            return
        was_loaded = model.state in ("loaded", "unloading")
        model.engine = None
        model.failure = reason
        self._set(model, "unloaded", has_room=False)
        await engine.stop()
        if was_loaded and time.monotonic() - model.loaded_at > _STABLE_SECONDS:
            self._load_soon(model)

    def terminate(self) -> None:
        """Let each engine end its requests, as alone at the end of its server."""
        for model in self.all:
            for waiter in model.waiters:
                if not waiter.done():
                    waiter.set_exception(shutting_down())
            if model.engine is not None:
                model.engine.terminate()

    async def shut_down(self) -> None:
        """End all engines."""
        self.admission.is_draining = True
        for task in list(self._tasks):
            task.cancel()
        engines = [model.engine for model in self.all if model.engine is not None]
        await asyncio.gather(*(engine.stop() for engine in engines), return_exceptions=True)

    def _set(self, model: Model, state: str, *, has_room: bool | None = None) -> None:
        model.state = state
        if has_room is not None:
            model.has_room = has_room
        self._changed.set()

    def _tell(self, model: Model, line: str) -> None:
        complain(f"[{model.name}] {line}" if self.log.is_plain else line)


def _cannot_load(model: Model) -> APIError:
    return APIError(
        500, f"the model {model.name!r} cannot be loaded: {model.failure}", code="model_load_failed"
    )
