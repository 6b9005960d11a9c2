"""One engine: `nanovllm serve` in a process of its own, on a Unix socket that only we can use."""

import asyncio
import contextlib
import json
import os
import re
import signal
import sys
from collections import deque
from collections.abc import Callable, Sequence as Seq

import httpx

from nanovllm.apps.server.server_options import API_KEY_VARIABLE
from nanovllm.errors import ServerError
from nanovllm.utils.system import kill_group, own_session

_COMMAND = """
import ctypes, json, signal, sys
sys.argv += [f"--api-key={key}" for key in json.load(sys.stdin)]  # unseen in the list of processes
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG: end when the router does
from nanovllm.apps.cli.main import main
sys.exit(main())
"""
_POLL_SECONDS = 0.05
_END_SECONDS = 10.0
_PROBE_SECONDS = 5.0
_MAX_LINE = 2**16
_KEPT_LINES = 20
_ERROR = re.compile(r"nanovllm: (.*)")


class EngineProcess:
    """A process that serves one model, and the client that talks to it.

    Args:
        words: the arguments of the command `nanovllm`.
        path: of the socket; its directory must be one that only this user can enter.
        api_keys: of the router: it asks with the first of them, and users take turns there.
        tell: gets each line of its log.
    """

    def __init__(
        self,
        words: Seq[str],
        path: str,
        api_keys: Seq[str],
        tell: Callable[[str], object],
    ) -> None:
        self._words = [*words, f"--uds={path}"]
        self._api_keys = list(api_keys)
        self._tell = tell
        self._tail: deque[str] = deque(maxlen=_KEPT_LINES)
        self.client = httpx.AsyncClient(
            transport=httpx.AsyncHTTPTransport(
                uds=path, limits=httpx.Limits(max_connections=None, max_keepalive_connections=64)
            ),
            base_url="http://localhost",
            timeout=None,
        )
        if api_keys:
            self.client.headers["Authorization"] = f"Bearer {api_keys[0]}"
        self.is_stopping = False

    async def start(self) -> None:
        """Start the process; all else needs one."""
        environment = {**os.environ}
        environment.pop(API_KEY_VARIABLE, None)  # a key may have a comma
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", _COMMAND, *self._words),
            env=environment,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            limit=_MAX_LINE,
            **own_session(),  # Ctrl-C is for the router, which ends its engines in order
        )
        self._reading = asyncio.create_task(self._read())
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(self._api_keys).encode())
        self._process.stdin.close()

    @property
    def is_alive(self) -> bool:
        return self._process.returncode is None

    async def wait_until_ready(self) -> None:
        """Return when the model is loaded.

        Raises:
            ServerError: the process ended, with the reason from its log.
        """
        while True:
            if not self.is_alive:
                raise ServerError(await self.ended())
            with contextlib.suppress(httpx.TransportError):
                if (await self.client.get("/ready")).status_code == 200:
                    return
            await asyncio.sleep(_POLL_SECONDS)

    async def ended(self) -> str:
        """Return, when the process has ended, why: the error in its log, or the signal."""
        status = await self._process.wait()
        await asyncio.wait([self._reading], timeout=1.0)
        errors = [found[1] for line in self._tail if (found := _ERROR.fullmatch(line))]
        if status < 0:
            name = signal.Signals(-status).name
            why = ": the system may lack memory" if name == "SIGKILL" else ""
            return f"its process was ended by {name}{why}"
        return errors[-1] if errors else f"its process ended with status {status}"

    async def call(self, path: str, seconds: float) -> bool:
        """Post to a route without a body; return whether it worked within `seconds`.

        A process that hangs fails within 5 s.
        """
        try:
            async with asyncio.timeout(_PROBE_SECONDS):
                await self.client.get("/health")
            async with asyncio.timeout(seconds):
                return (await self.client.post(path)).status_code == 200
        except (httpx.HTTPError, TimeoutError):
            return False

    def terminate(self) -> None:
        """Ask the process to end; it ends its requests as a server that shuts down does."""
        if self.is_alive and not self.is_stopping:  # at a second signal it ends at once
            self._process.terminate()
        self.is_stopping = True

    async def stop(self) -> None:
        """End the process; requests that it still has are lost."""
        self.terminate()
        if self.is_alive:
            try:
                await asyncio.wait_for(self._process.wait(), _END_SECONDS)
            except TimeoutError:
                with contextlib.suppress(ProcessLookupError):
                    kill_group(self._process.pid)
                await self._process.wait()
        await self.client.aclose()

    async def _read(self) -> None:
        """Pass on the lines of the log, and keep the last."""
        stream = self._process.stderr
        assert stream is not None
        while True:
            try:
                raw = await stream.readline()
            except ValueError:  # a line over the limit, which is dropped
                continue
            if not raw:
                return
            line = raw.decode(errors="replace").rstrip()
            self._tail.append(line)
            if line and not line.startswith(" "):  # what the banner tells of the socket
                self._tell(line)
