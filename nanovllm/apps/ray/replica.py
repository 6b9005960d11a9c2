"""A replica: one engine with the server's app on it, called by the frontends.

Owns the engine's life in a Ray actor.
"""

import asyncio
import logging
import os
from collections.abc import AsyncGenerator, Mapping
from typing import Any

import ray
from ray import serve
from starlette.types import Message, Scope

from nanovllm.apps.server.app import make_app
from nanovllm.apps.server.server_options import ServerOptions
from nanovllm.apps.server.state import ServerState
from nanovllm.async_llm import AsyncLLM
from nanovllm.errors import ConfigError

logger = logging.getLogger(__name__)

_WATCH_SECONDS = 0.5


class EngineReplica:
    """What Ray Serve makes of each replica: an `AsyncLLM`, and the server's app.

    Args:
        engine_options: the fields of `Config`.
        options: the server's.
    """

    def __init__(self, engine_options: Mapping[str, Any], options: ServerOptions) -> None:
        logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
        check_gpus(engine_options, len(ray.get_gpu_ids()), _num_gpus_of_node())
        self._llm = AsyncLLM(**engine_options)
        self._app = make_app(self._llm, options)
        self._server: ServerState = self._app.state.server
        loop = asyncio.get_running_loop()
        self._tasks = {
            loop.create_task(self._watch_engine()),
            loop.create_task(self._server.metrics.watch_event_loop()),
        }

    async def answer(self, scope: Scope, body: bytes) -> AsyncGenerator[list[Message], None]:
        """Run the app on one HTTP request, and yield the ASGI messages of its answer as they come.

        Closing the iterator tells the app that the client is gone, which aborts the request.

        Args:
            scope: of ASGI; what cannot be sent to another process is left out.
            body: the whole body.
        """
        outbox = _Outbox()
        client_gone = asyncio.Event()
        unread = [body]

        async def receive() -> Message:
            if unread:
                return {"type": "http.request", "body": unread.pop()}
            await client_gone.wait()
            return {"type": "http.disconnect"}

        task = asyncio.create_task(self._app(dict(scope), receive, outbox.put))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda _: outbox.close())
        try:
            while messages := await outbox.take():
                yield messages
            await task  # raises what the app could not turn into an answer
        finally:
            client_gone.set()

    async def metrics(self) -> tuple[str, bytes]:
        """Return the replica's name, and its metrics in Prometheus' text format."""
        name = serve.get_replica_context().replica_id.unique_id
        return name, await self._server.metrics.render()

    async def check_health(self) -> None:
        """Raise EngineDeadError if the engine is down: Ray Serve starts another replica."""
        await self._llm.check_health()

    def __del__(self) -> None:
        """End the engine. Ray Serve calls this when the replica's requests have ended."""
        if "_tasks" in self.__dict__:  # the constructor may have failed
            for task in self._tasks:  # first the watch: it would end the process
                task.cancel()
            self._llm.shutdown()

    async def _watch_engine(self) -> None:
        """End the process when the engine is dead, as `nanovllm serve` does.

        Ray Serve's own check runs every ten seconds, and a replica that answers nothing but errors
        looks idle until then.
        """
        try:
            while True:
                await asyncio.sleep(_WATCH_SECONDS)
                await self._llm.check_health()
        except Exception as error:
            logger.error("the engine is dead, so the replica ends: %s", error)
            self._llm.shutdown()
            os._exit(1)


def check_gpus(engine_options: Mapping[str, Any], num_own: int, num_of_node: int) -> None:
    """Raise ConfigError if the engine would run on the CPU because Ray hides the node's GPUs.

    Args:
        num_own: GPUs that Ray lets the replica see.
        num_of_node: GPUs of its node.
    """
    by_ray = engine_options.get("distributed_executor_backend") == "ray"  # its ranks have GPUs
    if engine_options.get("device", "auto") == "auto" and num_of_node > num_own == 0 and not by_ray:
        raise ConfigError(
            f"the replica's node has {num_of_node} GPUs and the replica has none: give "
            'ray_actor_options={"num_gpus": 1}, or device="cpu" to run on the CPU'
        )


def _num_gpus_of_node() -> int:
    own = ray.get_runtime_context().get_node_id()
    nodes: list[dict[str, Any]] = ray.nodes()
    return max(int(node["Resources"].get("GPU", 0)) for node in nodes if node["NodeID"] == own)


class _Outbox:
    """Messages that wait to be sent. Parts of a body that wait together become one."""

    def __init__(self) -> None:
        self._messages: list[Message] = []
        self._has_news = asyncio.Event()
        self._is_closed = False

    async def put(self, message: Message) -> None:
        """Add a message: ASGI's `send`."""
        is_body = message["type"] == "http.response.body"
        if is_body and self._messages and self._messages[-1]["type"] == message["type"]:
            before = self._messages.pop()
            body = before.get("body", b"") + message.get("body", b"")
            message = {**message, "body": body}
        self._messages.append(message)
        self._has_news.set()

    def close(self) -> None:
        """Say that no message comes any more."""
        self._is_closed = True
        self._has_news.set()

    async def take(self) -> list[Message]:
        """Wait for messages and return all that are there; none at the end."""
        while not self._messages and not self._is_closed:
            self._has_news.clear()
            await self._has_news.wait()
        taken = self._messages
        self._messages = []
        return taken
