"""Put a server under mixed load, and check every answer.

A separate server answers the shipped model's questions, on all routes that generate, make vectors
or tokenize; with --models N it has N models, two of which fit in memory. Its clients stream or
wait, read slowly, disconnect in mid-answer, or send nonsense. Each complete answer must be the one
that this process computes for the same request. Afterwards no request may be left, no KV block may
be in use, and memory must not have grown. Then SIGTERM arrives under load; with --kill-rank,
SIGKILL for one of two ranks.
"""

import argparse
import asyncio
import contextlib
import dataclasses
import json
import random
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import numpy as np
import psutil  # type: ignore[import-untyped]
from tqdm import tqdm

from nanovllm import LLM, SamplingParams, demo_model
from nanovllm.options.validation import shown

KEY = "sk-soak"
PATH = "/v1/chat/completions"
PATHS = (PATH, "/v1/completions", "/v1/responses", "/v1/messages")
MODEL = "soak"
KEEP_ALIVE = "2s"
DRAIN_SECONDS = 5.0
MALFORMED: tuple[tuple[bytes, str], ...] = (
    (b"{", "not JSON"),
    (b"[]", "no object"),
    (b'{"model": "soak0"}', "no messages"),
    (b'{"model": "soak0", "messages": 3}', "messages is a number"),
    (b'{"model": "soak0", "messages": [{"role": "user", "content": "x"}], "n": 0}', "n is 0"),
    (b'{"model": "soak0", "messages": [{"role": "user", "content": "x"}], "top_p": 7}', "top_p"),
    (b'{"model": "soak0", "messages": [{"role": "user", "content": "x"}], "seed": "a"}', "seed"),
    (b'{"model": "soak0", "messages": [{"role": "user", "content": "\xff"}]}', "not UTF-8"),
)


@dataclasses.dataclass(frozen=True)
class Case:
    """A request, and the answer that it must get."""

    body: dict[str, Any]
    prompt: list[int]
    """What a completion continues."""
    text: str
    vector: list[float]
    """What /v1/embeddings makes of the prompt."""

    def sent(self, path: str, model: str) -> dict[str, Any]:
        """Return the body of the request for a route."""
        body = {**self.body, "model": model}
        if path == "/v1/completions":
            body["prompt"] = self.prompt
            del body["messages"]
        elif path == "/v1/responses":
            body["input"] = body.pop("messages")
            body["max_output_tokens"] = body.pop("max_tokens")
        elif path == "/v1/messages":  # whose template is told not to think by default
            body["thinking"] = {"type": "enabled", "budget_tokens": 1024}
        return body


def text_in(path: str, found: dict[str, Any]) -> str:
    """Return the text of a whole answer, or of one event of a stream."""
    match path:
        case "/v1/responses":
            parts = [part for item in found.get("output", ()) for part in item.get("content", ())]
            whole = "".join(part.get("text", "") for part in parts)
            is_delta = found.get("type") == "response.output_text.delta"
            return found["delta"] if is_delta else whole * ("type" not in found)
        case "/v1/messages":
            whole = "".join(part.get("text", "") for part in found.get("content", ()))
            return found["delta"].get("text", "") if "delta" in found else whole
        case _:
            choice = found["choices"][0] if found.get("choices") else {}
            message = choice.get("message") or choice.get("delta") or {}
            return choice.get("text") or message.get("content") or ""


def make_cases(number: int) -> list[Case]:
    """Return requests of many lengths and temperatures, with an engine's answer to each alone."""
    llm, rng, bodies, prompts, params = LLM(demo_model.MODEL), random.Random(0), [], [], []
    questions = [question for question, _ in demo_model.entries()]
    for index in range(number):
        messages = [{"role": "user", "content": rng.choice(questions)}]
        options: dict[str, Any] = {
            "temperature": rng.choice([0.0, 0.7, 1.5]),
            "seed": index,
            "max_tokens": rng.choice([1, 8, 64, 200]),
        }
        bodies.append({"messages": messages, **options})
        prompts.append(llm.render(messages, add_generation_prompt=True))
        defaults = llm.get_default_sampling_params()
        params.append(dataclasses.replace(defaults, **options))
    outputs = llm.generate(prompts, list[SamplingParams](params), use_tqdm=False)
    tokens = [out.prompt_token_ids for out in outputs]
    vectors = [out.outputs.embedding for out in llm.embed(tokens, use_tqdm=False)]
    llm.shutdown()
    texts = [out.text for out in outputs]
    return [Case(*case) for case in zip(bodies, tokens, texts, vectors, strict=True)]


class Server:
    """A process that serves the shipped model.

    Args:
        num_models: 1, or how many models there are by name; memory has room for two.
    """

    def __init__(self, *flags: str, num_models: int = 1) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self.models = [f"{MODEL}{number}" for number in range(num_models)]
        words = [f"{name}={demo_model.MODEL}" for name in self.models]
        if num_models == 1:
            words = [demo_model.MODEL, "--served-model-name", *self.models]
        else:
            words += ["--keep-alive", KEEP_ALIVE, "--gpu-memory-utilization", "0.4"]
        command = [sys.executable, "-m", "nanovllm.apps.cli.main", "serve", *words]
        command += [
            "--port",
            str(port),
            "--api-key",
            KEY,
            "--drain-seconds",
            str(DRAIN_SECONDS),
            *flags,
        ]
        self.process = psutil.Popen(command, stderr=subprocess.DEVNULL)

    async def wait_until_ready(self, client: httpx.AsyncClient) -> float:
        """Return the seconds that it took."""
        start = time.monotonic()
        while True:
            assert self.process.poll() is None, "the server ended"
            with contextlib.suppress(httpx.TransportError):
                if (await client.get("/ready")).status_code == 200:
                    return time.monotonic() - start
            await asyncio.sleep(0.05)

    def memory(self) -> int:
        """Return the resident bytes of the process and its ranks."""
        processes = [self.process, *self.process.children(recursive=True)]
        return sum(process.memory_info().rss for process in processes)


class Load:
    """Clients of one server; counts what happened."""

    def __init__(
        self, client: httpx.AsyncClient, models: list[str], cases: list[Case], seed: int
    ) -> None:
        self.counts: Counter[str] = Counter()
        self.faults: list[str] = []
        self._client = client
        self._models = models
        self._cases = cases
        self._rng = random.Random(seed)
        self._kinds: tuple[tuple[Callable[[Case], Awaitable[None]], int], ...] = (
            (self.whole, 5),
            (self.streamed, 5),
            (self.slow, 1),
            (self.embedded, 2),
            (self.tokenized, 1),
            (self.leaves, 7),
            (self.malformed, 1),
        )

    async def one(self) -> None:
        """Be a client of some kind."""
        kinds, weights = zip(*self._kinds, strict=True)
        kind = self._rng.choices(kinds, weights)[0]
        case = self._rng.choice(self._cases)
        try:
            await asyncio.wait_for(kind(case), 60)
        except TimeoutError:
            self.faults.append(f"{kind.__name__}: no answer in a minute to {case.body}")
        self.counts[kind.__name__] += 1

    async def whole(self, case: Case) -> None:
        """Wait for the whole answer."""
        path, body = self.request(case)
        answer = await self._posted(path, body)
        is_good = answer.status_code == 200
        self.check(case, text_in(path, answer.json()) if is_good else answer.text)

    async def embedded(self, case: Case) -> None:
        """Have the prompt made a vector, beside requests that generate."""
        body = {"model": self._rng.choice(self._models), "input": case.prompt}
        answer = await self._posted("/v1/embeddings", body)
        found = answer.json()["data"][0]["embedding"] if answer.status_code == 200 else []
        if len(found) != len(case.vector) or not np.allclose(found, case.vector, atol=1e-5):
            self.faults.append(f"{case.body}: the vector is not that of the engine alone")

    async def tokenized(self, case: Case) -> None:
        """Have the conversation tokenized, and its tokens made a text."""
        model = self._rng.choice(self._models)
        body = {"model": model, "messages": case.body["messages"], "add_generation_prompt": True}
        answer = await self._posted("/tokenize", body)
        if answer.status_code != 200 or answer.json()["tokens"] != case.prompt:
            self.faults.append(f"{case.body}: tokenized as {shown(answer.text)}")
        answer = await self._posted("/detokenize", {"model": model, "tokens": case.prompt})
        question = case.body["messages"][0]["content"]
        if answer.status_code != 200 or question not in answer.json()["prompt"]:
            self.faults.append(f"{case.body}: detokenized as {shown(answer.text)}")

    async def _posted(self, path: str, body: dict[str, Any]) -> httpx.Response:
        """Return the whole answer; while the server has no room, ask again."""
        while (answer := await self._client.post(path, json=body)).status_code == 503:
            self.counts["503"] += 1
            await asyncio.sleep(min(1.0, float(answer.headers["retry-after"])))
        return answer

    def request(self, case: Case) -> tuple[str, dict[str, Any]]:
        """Return a route, and a body for one of the models."""
        path = self._rng.choice(PATHS)
        self.counts[path] += 1
        return path, case.sent(path, self._rng.choice(self._models))

    async def streamed(self, case: Case, seconds: float = 0.0, most: float = float("inf")) -> None:
        """Read a stream, pausing `seconds` after each of its lines; leave after `most`."""
        path, body = self.request(case)
        text = ""
        async with self._client.stream("POST", path, json={**body, "stream": True}) as answer:
            if answer.status_code == 503:
                self.counts["503"] += 1
                return
            count = 0
            async for line in answer.aiter_lines():
                if count >= most:
                    return
                if line.startswith("data: ") and line != "data: [DONE]":
                    text += text_in(path, json.loads(line[6:]))
                    count += 1
                    await asyncio.sleep(seconds)
        self.check(case, text)

    async def slow(self, case: Case) -> None:
        """Read a stream slowly."""
        await self.streamed(case, seconds=0.05)

    async def leaves(self, case: Case) -> None:
        """Disconnect: before the answer, or after a few pieces of it."""
        if self._rng.random() < 0.5:
            await self.streamed(case, most=self._rng.randint(0, 5))
            return
        with contextlib.suppress(TimeoutError):
            delay = self._rng.uniform(0, 0.05)
            path, body = self.request(case)
            await asyncio.wait_for(self._client.post(path, json=body), delay)

    async def malformed(self, case: Case) -> None:
        """Send nonsense, which must be refused with OpenAI's body."""
        body, what = self._rng.choice(MALFORMED)
        headers = {"content-type": "application/json"}
        answer = await self._client.post(PATH, content=body, headers=headers)
        if answer.status_code != 400 or "message" not in answer.json().get("error", {}):
            self.faults.append(f"{what}: {answer.status_code} {answer.text[:200]}")

    def check(self, case: Case, text: str) -> None:
        """Note a fault if `text` is not the answer of `case`."""
        if text != case.text:
            self.faults.append(f"{case.body}: {shown(text)} is not {shown(case.text)}")


async def gauges(client: httpx.AsyncClient) -> dict[str, float]:
    """Return the numbers of /metrics by name, summed over labels."""
    found: Counter[str] = Counter()
    for line in (await client.get("/metrics")).text.splitlines():
        if not line.startswith("#"):
            name, value = line.rsplit(" ", 1)
            found[name.partition("{")[0]] += float(value)  # type: ignore[assignment]
    return dict(found)


async def is_idle(client: httpx.AsyncClient, seconds: float = 10.0) -> dict[str, float]:
    """Return the gauges once nothing runs or waits, or after `seconds`."""
    names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
    end = time.monotonic() + seconds
    while True:
        found = {name: value for name, value in (await gauges(client)).items() if name in names}
        if not any(found.values()) or time.monotonic() > end:
            return found
        await asyncio.sleep(0.1)


async def mixed_load(
    server: Server, client: httpx.AsyncClient, cases: list[Case], args: Any
) -> list[str]:
    """Run the clients; return the faults."""
    load = Load(client, server.models, cases, args.seed)
    end = time.monotonic() + 60 * args.minutes
    memory: list[int] = []
    left = args.requests

    async def worker(bar: Any) -> None:
        nonlocal left
        while left > 0 or time.monotonic() < end:
            left -= 1
            await load.one()
            bar.update()

    async def watch() -> None:
        while True:
            memory.append(server.memory())
            await asyncio.sleep(1)

    with tqdm(desc="Requests", total=args.requests or None) as bar:
        watcher = asyncio.create_task(watch())
        await asyncio.gather(*(worker(bar) for _ in range(args.concurrency)))
        watcher.cancel()
    idle = await is_idle(client)
    if any(idle.values()):
        load.faults.append(f"not idle after the load: {idle}")
    sixths = [np.median(part) / 1e6 for part in np.array_split(memory, 6)]
    print(f"clients: {dict(load.counts)}; idle: {idle}")
    print("resident MB, the median of each sixth of the time:", *(f"{each:.1f}" for each in sixths))
    return load.faults


async def ended_by(server: Server, client: httpx.AsyncClient, cases: list[Case], kill: str) -> None:
    """End the server under load; print how it went."""
    load = Load(client, server.models, cases, 1)

    async def request(case: Case) -> str:
        try:
            body = case.sent(PATH, server.models[0])
            answer = await asyncio.wait_for(client.post(PATH, json=body), 30)
        except httpx.TransportError as error:
            return type(error).__name__
        except TimeoutError:
            return "no answer in 30 s"
        if answer.status_code == 200:
            load.check(case, answer.json()["choices"][0]["message"]["content"])
        return str(answer.status_code)

    tasks = [asyncio.create_task(request(case)) for case in cases]
    while sum(task.done() for task in tasks) < len(tasks) // 8:
        await asyncio.sleep(0.01)
    start = time.monotonic()
    if kill == "SIGTERM":
        server.process.send_signal(signal.SIGTERM)
    else:
        ranks = server.process.children(recursive=True)
        ranks = [rank for rank in ranks if "spawn_main" in " ".join(rank.cmdline())]
        ranks[-1].kill()
    outcomes = Counter(await asyncio.gather(*tasks))
    status = await asyncio.to_thread(server.process.wait, DRAIN_SECONDS + 15)
    print(
        f"{kill}: exit status {status} after {time.monotonic() - start:.1f} s; "
        f"answers {dict(outcomes)}; wrong ones: {load.faults or 'none'}"
    )


async def run(args: argparse.Namespace) -> None:
    """Serve, load and end the server once for each way to end it."""
    cases = make_cases(args.cases)
    flags = ("--max-num-seqs", "64", "--num-kvcache-blocks", str(args.blocks))
    limits = httpx.Limits(max_connections=None)
    options: dict[str, Any] = {"headers": {"authorization": f"Bearer {KEY}"}, "limits": limits}
    server = Server(*flags, num_models=args.models)
    async with httpx.AsyncClient(base_url=server.url, timeout=None, **options) as client:
        print(f"ready after {await server.wait_until_ready(client):.1f} s")
        faults = await mixed_load(server, client, cases, args)
        print(f"faults: {len(faults)}", *faults[:10], sep="\n  ")
        await ended_by(server, client, cases, "SIGTERM")
    if args.kill_rank:
        server = Server(*flags, "--tensor-parallel-size", "2")
        async with httpx.AsyncClient(base_url=server.url, timeout=None, **options) as client:
            await server.wait_until_ready(client)
            await ended_by(server, client, cases, "SIGKILL of a rank")


def main() -> None:
    """Parse the arguments and run."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak", description=__doc__)
    parser.add_argument("--requests", type=int, default=2000, help="at least so many")
    parser.add_argument("--minutes", type=float, default=0.0, help="at least so long")
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--cases", type=int, default=300, help="different requests")
    parser.add_argument("--blocks", type=int, default=200, help="of the KV pool: few preempt")
    parser.add_argument("--models", type=int, default=1, help="behind the address")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kill-rank", action="store_true")
    asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
