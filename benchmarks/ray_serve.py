"""What Ray Serve adds to a request, and what the frontend adds to Ray Serve.

The shipped model answers in three ways, in turns: `nanovllm serve`; Ray Serve with the server's app
in the replica that the proxy calls; and `nanovllm.apps.ray.deployment`, which puts a frontend in
between. The model is so small that HTTP takes most of the time. Prints a table with the
milliseconds of a request for one token, and of each token of a stream of 128, and the milliseconds
of processor time that the proxy, the frontend and the replica spend on them.
"""

import argparse
import contextlib
import http.client
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import ray
from ray import serve
from starlette.types import ASGIApp

from nanovllm import demo_model
from nanovllm.apps.ray import deployment
from nanovllm.apps.ray.replica import EngineReplica
from nanovllm.apps.server.server_options import ServerOptions

OPTIONS: dict[str, Any] = {"max_model_len": 1024, "num_kvcache_blocks": 512, "num_threads": 1}
NUM_TOKENS = 128
PROCESSES = {
    "proxy": "ray::ProxyActor",
    "frontend": "ray::ServeReplica:full:Frontend",
    "replica": "ray::ServeReplica:",
}


class Direct(EngineReplica):
    """A replica that the proxy calls itself."""

    def __serve_build_asgi_app__(self) -> ASGIApp:
        """Return the server's app."""
        return self._app


class Way(NamedTuple):
    """Where the model answers."""

    name: str
    port: int
    path: str


def free_port() -> int:
    """Return a free port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextlib.contextmanager
def ways() -> Iterator[list[Way]]:
    """Start the three ways and return them."""
    found = [Way("nanovllm serve", free_port(), "")]
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in OPTIONS.items()]
    command = [sys.executable, "-m", "nanovllm.apps.cli.main", "serve", demo_model.MODEL, *flags]
    with subprocess.Popen(
        [*command, f"--port={found[0].port}"], stderr=subprocess.DEVNULL
    ) as process:
        ray.init("local", num_cpus=4, include_dashboard=False, log_to_driver=False)
        port = free_port()
        serve.start(http_options={"port": port})
        direct = serve.deployment(max_ongoing_requests=100)(serve.ingress()(Direct))
        engine_options = {"model": demo_model.MODEL, **OPTIONS}
        serve.run(
            direct.bind(engine_options, ServerOptions(root_path="/direct")),
            name="direct",
            route_prefix="/direct",
        )
        serve.run(deployment(demo_model.MODEL, **OPTIONS), name="full", route_prefix="/full")
        yield [*found, Way("Ray Serve", port, "/direct"), Way("nanovllm.apps.ray", port, "/full")]
        serve.shutdown()
        ray.shutdown()
        process.terminate()


def ask(way: Way, num_requests: int, max_tokens: int) -> float:
    """Send requests one after the other on one connection; return the median of their seconds."""
    connection = http.client.HTTPConnection("127.0.0.1", way.port, timeout=60)
    body = json.dumps(
        {
            "prompt": [5, 6, 7],
            "max_tokens": max_tokens,
            "ignore_eos": True,
            "stream": max_tokens > 1,
        }
    )
    found = []
    for _ in range(num_requests):
        start = time.perf_counter()
        headers = {"Content-Type": "application/json"}
        connection.request("POST", f"{way.path}/v1/completions", body, headers)
        answer = connection.getresponse()
        assert answer.status == 200, answer.read()
        answer.read()
        found.append(time.perf_counter() - start)
    connection.close()
    return median(found)


def cpu_seconds() -> dict[str, float]:
    """Return the processor time of Ray Serve's processes so far."""
    found = dict.fromkeys(PROCESSES, 0.0)
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            title = (path / "cmdline").read_text()
            name = next((name for name, start in PROCESSES.items() if title.startswith(start)), "")
            if name:
                user, system = (path / "stat").read_text().rpartition(")")[2].split()[11:13]
                found[name] += (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")
    return found


def measure(way: Way, clients: int, num_requests: int, max_tokens: int) -> list[str]:
    """Return the cells of a row: milliseconds for a request, or for a token of a stream."""
    before = cpu_seconds()
    with ThreadPoolExecutor(clients) as pool:
        times = list(pool.map(lambda _: ask(way, num_requests, max_tokens), range(clients)))
    spent = {name: seconds - before[name] for name, seconds in cpu_seconds().items()}
    num_all = clients * num_requests * max_tokens
    cells = [median(times) / max_tokens, *(seconds / num_all for seconds in spent.values())]
    return [f"{1000 * cell:.2f}" for cell in cells]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=30)
    args = parser.parse_args()
    print("| what | clients | way | ms | proxy | frontend | replica |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    with ways() as found:
        for way in found:
            ask(way, 5, 16)
        for max_tokens, what in ((1, "a request"), (NUM_TOKENS, "a token of a stream")):
            for clients in (1, 16):
                number = args.requests if max_tokens == 1 else max(1, args.requests // 10)
                for _ in range(args.rounds):
                    for way in found:
                        cells = measure(way, clients, number, max_tokens)
                        print(f"| {what} | {clients} | {way.name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
