"""How near is `nanovllm lab plan` to a real server? Calibrates, then sends the same requests at the
same moments to `nanovllm serve` and to a replica in virtual time, and prints what both got.

A workload runs at shares of the rate at which the replica is saturated. The client runs on the same
machine, and what HTTP takes there counts for the server alone. How fast a shared machine is changes
within minutes. So the server's trace says how long its steps took in the run, beside what they take
by the plan, and the last column is that of a plan whose steps are slower or faster by that much.
"""

import argparse
import asyncio
import contextlib
import json
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import httpx
import numpy as np

from benchmarks.harness import Table, loadable, make_parser
from nanovllm.apps.plan.calibrate import calibrate
from nanovllm.apps.plan.fleet import Fleet
from nanovllm.apps.plan.options import MadeRequests, Objective, option_of
from nanovllm.apps.plan.planned_requests import PlannedRequest, made
from nanovllm.apps.plan.report import Outcome
from nanovllm.apps.plan.step_cost import StepCost
from nanovllm.options.config import Config

WORKLOADS = {
    "chat": MadeRequests(prompt_len=120, output_len=48),
    "documents": MadeRequests(prompt_len=700, output_len=24, spread=0.4),
    "bursts": MadeRequests(prompt_len=120, output_len=48, burstiness=6.0),
    "conversations": MadeRequests(
        prompt_len=60, output_len=32, shared_len=200, num_groups=2, num_turns=3, think_seconds=8.0
    ),
}
SHARES = (0.3, 0.6, 0.9)
PORT = 8731
FIGURES = [(name, which) for which in ("p50", "p99") for name in ("ttft", "tpot")]


class Got(NamedTuple):
    """What a request got; times are in seconds."""

    ttft: float
    tpot: float
    token_ids: list[int]


def step_seconds(trace: Path) -> float:
    """Return how long all steps took that a server has written to its trace."""
    time.sleep(1.5)  # it writes once a second
    events = json.loads(trace.read_text("utf-8"))
    return float(sum(event["dur"] for event in events if event.get("name") == "step")) / 1e6


def slower(cost: StepCost, times: float) -> StepCost:
    """Return the cost of steps that take so many times as long."""
    parts = ("for_prompt", "per_row", "per_sample", "per_key", "per_pair")
    changed = {name: getattr(cost, name) * times for name in parts}
    return replace(cost, at_knots=tuple(times * each for each in cost.at_knots), **changed)


def simulated(cost: StepCost, requests: list[PlannedRequest]) -> Outcome:
    """Return what a replica in virtual time answers."""
    return Fleet(cost, Objective()).outcome(requests, 1)


@contextlib.contextmanager
def server(model: str, load_format: str, options: list[str]) -> Iterator[httpx.AsyncClient]:
    """Run `nanovllm serve`; yield a client of it."""
    command = [sys.executable, "-m", "nanovllm", "serve", model, "--port", str(PORT)]
    command += ["--load-format", load_format, "--served-model-name", "default", *options]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while True:
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"http://127.0.0.1:{PORT}/health").is_success:
                    break
            if process.poll() is not None:
                sys.exit(f"planned.py: {' '.join(command)} ended with {process.returncode}")
            time.sleep(0.2)
        limits = httpx.Limits(max_connections=None)
        yield httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{PORT}", timeout=None, limits=limits, trust_env=False
        )
    finally:
        process.terminate()
        process.wait()


async def send(client: httpx.AsyncClient, prompt: list[int], num_output: int) -> Got:
    """Send a request; return what it got."""
    body = {
        "model": "default",
        "prompt": prompt,
        "max_tokens": num_output,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
    }
    start = first = last = time.perf_counter()
    token_ids: list[int] = []
    async with client.stream("POST", "/v1/completions", json=body) as response:
        if not response.is_success:
            raise SystemExit(f"planned.py: {await response.aread()!r:.500}")
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            for choice in json.loads(line.removeprefix("data: "))["choices"]:
                last = time.perf_counter()
                first = first if token_ids else last
                token_ids += choice["token_ids"]
    return Got(first - start, (last - first) / max(len(token_ids) - 1, 1), token_ids)


async def replay(
    client: httpx.AsyncClient, requests: list[PlannedRequest], vocab_size: int
) -> list[Got]:
    """Send requests at their moments. What an earlier turn was answered is in the next prompt."""
    said: dict[int, list[int]] = {}
    salt = random.random()  # so that no run hits what an earlier one has cached
    start = time.perf_counter()

    def tokens_of(token_id: int, length: int) -> list[int]:
        rng = random.Random(salt + token_id)
        made_up = [rng.randrange(vocab_size) for _ in range(length)]
        return (said.get(token_id, []) + made_up)[:length]

    async def ask(request: PlannedRequest) -> Got:
        await asyncio.sleep(start + request.arrival - time.perf_counter())
        prompt = [token for each in request.prompt for token in tokens_of(*each)]
        got = await send(client, prompt, request.num_output)
        assert len(got.token_ids) == request.num_output, (len(got.token_ids), request)
        said[request.output_token] = got.token_ids
        return got

    return await asyncio.gather(*map(ask, requests))


def main(args: argparse.Namespace) -> None:
    """Compare both, workload by workload."""
    table = Table(
        *("workload", "load", "requests"),
        *(f"{name} {which}, real / plan, s" for name, which in FIGURES),
        *("plan's over real", "steps, real over plan's", "plan's over real, with such steps"),
    )
    options = dict(map(option_of, args.option))
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    with loadable(args.model) as (model, load_format), TemporaryDirectory() as directory:
        if args.cost and Path(args.cost).exists():
            cost = StepCost.load(Path(args.cost))
        else:
            config = Config(model=model, load_format=load_format, **options)
            cost = calibrate(config, args.seconds, lambda words: None)
            if args.cost:
                cost.save(Path(args.cost))
        cost = cost.with_options(options)
        print(f"{cost.source}; held-out steps are off by {cost.error[0]:.1%}, {cost.error[1]:.1%}")
        trace = Path(directory, "trace.json")
        flags.append(f"--trace-file={trace}")
        with server(model, load_format, flags) as client, asyncio.Runner() as runner:
            busy = 0.0
            for name in args.workloads.split(","):
                workload = WORKLOADS[name]
                flood = list(made(replace(workload, num_requests=300, rate=1e5)))
                most = 300 / simulated(cost, flood)["seconds"]
                for share in map(float, args.shares.split(",")):
                    count = max(20, round(share * most * args.minutes * 60))
                    chosen = replace(workload, num_requests=count, rate=share * most, seed=count)
                    requests = list(made(chosen))
                    vocab_size = min(cost.info.vocab_size, 50000)
                    got = runner.run(replay(client, requests, vocab_size))
                    busy, before = step_seconds(trace), busy
                    plan = simulated(cost, requests)
                    slowdown = (busy - before) / (plan["busy"] * plan["seconds"])
                    steady = simulated(slower(cost, slowdown), requests)
                    times: dict[str, list[float]] = {
                        "ttft": [each.ttft for each in got],
                        "tpot": [each.tpot for each in got if len(each.token_ids) > 1],
                    }
                    real = [
                        float(np.quantile(times[name], float(which[1:]) / 100))
                        for name, which in FIGURES
                    ]
                    both, corrected = (
                        [(one, answer[n][w]) for one, (n, w) in zip(real, FIGURES, strict=True)]
                        for answer in (plan, steady)
                    )
                    shown = [f"{one:.3f} / {other:.3f}" for one, other in both]
                    ratios, steady_ratios = (
                        ", ".join(f"{other / one:.2f}" for one, other in pairs)
                        for pairs in (both, corrected)
                    )
                    table.row(name, f"{share:.0%}", count, *shown, ratios, slowdown, steady_ratios)


if __name__ == "__main__":
    parser = make_parser("planned", __doc__, rounds=None)
    parser.add_argument("--cost", help="file of nanovllm lab calibrate; written if there is none")
    parser.add_argument("--seconds", type=float, default=110.0, help="to calibrate")
    parser.add_argument("--minutes", type=float, default=1.0, help="of each load")
    parser.add_argument("--shares", default=",".join(map(str, SHARES)))
    parser.add_argument("--workloads", default=",".join(WORKLOADS))
    parser.add_argument("--option", action="append", default=[], help="of the engine: NAME=VALUE")
    main(parser.parse_args())
