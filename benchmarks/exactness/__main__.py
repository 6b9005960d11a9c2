"""Send the requests of `nanovllm prove` to another engine, alone and then in the ways that it has.

For each way it prints in how many answers a bit differs, and in how many a token. The engine is
vllm, transformers or llamacpp, in a Python that has it, or the URL of a server with OpenAI's API:
such a one is asked for texts, several at once. The exit status is 1 if an answer differs.
"""

import asyncio
import dataclasses
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence as Seq
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.exactness.program import ENGINES
from benchmarks.exactness.server import Server, texts
from benchmarks.harness import Table, make_parser
from nanovllm.apps.prove.proof import DIFFERS, Verdict, full_name, verdict_of
from nanovllm.apps.prove.requests import Bits, ProofRequest, make_workload
from nanovllm.apps.prove.ways import Calls
from nanovllm.loading.hub import open_checkpoint
from nanovllm.loading.tokenizer import serving_tokenizer

PROGRAM = Path(__file__).with_name("program.py")
LONGEST, BLOCK = 320, 64
"""Most tokens of a request, and those of a block of the KV cache."""


class Run(NamedTuple):
    """An engine with some options, in a process of its own, and the ways that it computes.

    The first run of a setting has the way "alone", with which the others are compared.
    """

    options: dict[str, Any]
    ways: Mapping[str, Calls]
    setting: str = ""
    environment: Mapping[str, str] = {}
    evidence: str = ""
    """The count of the engine that must not be 0."""


def by(size: int, indices: Seq[int]) -> Calls:
    """Return calls of `size` requests each."""
    return tuple(tuple(indices[at : at + size]) for at in range(0, len(indices), size))


def batches(all_: tuple[int, ...], halves: tuple[int, ...]) -> dict[str, Calls]:
    """Return each request alone, alone again, and in batches."""
    found = {"alone": by(1, (*all_, *halves)), "alone again": by(1, all_[::-1])}
    return found | {f"batches of {size}": by(size, all_) for size in (2, 5, 64)}


def vllm_runs(all_: tuple[int, ...], halves: tuple[int, ...]) -> Iterator[Run]:
    """Yield vLLM's runs: as it comes, and in its batch-invariant mode."""
    base = {
        "max_model_len": LONGEST,
        "enforce_eager": True,
        "enable_prefix_caching": False,
        "max_num_seqs": 64,
        "max_num_batched_tokens": 1024,
        "disable_log_stats": False,
    }
    chunks = {**base, "max_num_seqs": 8, "max_num_batched_tokens": 32}
    cached = {**base, "enable_prefix_caching": True}
    few = {**base, "max_num_seqs": 8, "block_size": 128}
    few["num_gpu_blocks_override"] = -(-LONGEST // 128) + 1
    spec = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4}
    drafts = {**base, "speculative_config": spec}
    warm = {"half warm": (halves, all_), "warm": (all_, all_)}
    invariant = {"VLLM_BATCH_INVARIANT": "1"}
    for name, mode in (("", {}), ("batch-invariant mode", invariant)):
        yield Run(base, batches(all_, halves), name, mode)
        yield Run(chunks, {"chunks of 32 tokens": (all_,)}, name, mode)
        yield Run(cached, warm, name, mode, "cached tokens")
        yield Run(few, {"preempted": (all_,)}, name, mode, "preemptions")
        yield Run(drafts, {"n-gram drafts": (all_,)}, name, mode, "accepted drafts")
        one = {**mode, "VLLM_CPU_OMP_THREADS_BIND": "0"}
        yield Run(base, {"1 CPU thread": (all_,)}, name, one)


def transformers_runs(all_: tuple[int, ...], halves: tuple[int, ...]) -> Iterator[Run]:
    """Yield transformers' runs."""
    yield Run({}, batches(all_, halves))
    yield Run({"num_threads": 1}, {"1 CPU thread": by(1, all_)})
    yield Run({"prompt_lookup_num_tokens": 4}, {"n-gram drafts": by(1, all_)})


def llamacpp_runs(all_: tuple[int, ...], halves: tuple[int, ...]) -> Iterator[Run]:
    """Yield llama.cpp's runs."""
    base = {"num_seqs": min(64, len(all_)), "longest": LONGEST}
    yield Run(base, batches(all_, halves))
    yield Run({**base, "chunk": 17}, {"chunks of 17 tokens": by(1, all_)})
    yield Run({**base, "again": True}, {"warm": by(1, all_)})
    yield Run({**base, "num_threads": 1}, {"1 CPU thread": by(1, all_)})


RUNS = {"vllm": vllm_runs, "transformers": transformers_runs, "llamacpp": llamacpp_runs}


def engine_verdicts(
    name: str, python: str, model: str, num_requests: int, ways: Seq[str]
) -> Iterator[Verdict]:
    """Yield a verdict on each way of an engine whose name contains one of `ways`, if there are any.

    A way that the engine refuses has the status "did not run".
    """
    tokenizer = serving_tokenizer(open_checkpoint(model))
    if tokenizer is None:
        sys.exit(f"{model} has no tokenizer, so there are no prompts")
    vocab_size = len(tokenizer.get_vocab())
    requests, all_, halves, _ = make_workload(
        num_requests, vocab_size, BLOCK, LONGEST, tokenizer.encode
    )
    if name != "vllm":
        requests = [greedy(request) for request in requests]
    alone: dict[str, dict[int, Bits]] = {}
    for run in RUNS[name](all_, halves):
        chosen = {
            way: calls
            for way, calls in run.ways.items()
            if way == "alone" or not ways or any(text in way for text in ways)
        }
        if not chosen or ("alone" not in chosen and run.setting not in alone):
            continue
        lines, error = answers([python, str(PROGRAM), name], model, run, chosen, requests)
        for way in chosen:
            if way not in lines:
                yield Verdict(run.setting, way, "did not run", evidence=error)
                continue
            line = lines[way]
            found = [(index, _as_bits(bits)) for index, bits in line["answers"]]
            if way == "alone":
                alone[run.setting] = dict(found)
                continue
            happened = line["counts"].get(run.evidence, 0)
            yield verdict_of(
                run.setting,
                way,
                found,
                alone[run.setting],
                happened=happened > 0 or not run.evidence,
                evidence=f"{happened} {run.evidence}" if run.evidence else "",
                seconds=line["seconds"],
            )


def _as_bits(found: Seq[Any]) -> Bits:
    """Return the bits that another process wrote as JSON."""
    tokens, *values = found
    at = (tuple(tuple((t, v) for t, v in position) for position in each) for each in values)
    return Bits(tuple(tokens), *at)


def greedy(request: ProofRequest) -> ProofRequest:
    """Return the request for an engine that draws otherwise."""
    params = {"temperature": 0.0, "max_tokens": request.params["max_tokens"], "ignore_eos": True}
    return request._replace(params=params)


def answers(
    command: list[str],
    model: str,
    run: Run,
    ways: Mapping[str, Calls],
    requests: Seq[ProofRequest],
) -> tuple[dict[str, dict[str, Any]], str]:
    """Return the program's line about each way that it computed, and its last words."""
    job = {
        "model": model,
        "options": run.options,
        "requests": [request[:2] for request in requests],
        "ways": list(ways.items()),
    }
    done = subprocess.run(
        command,
        input=json.dumps(job),
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        env={**os.environ, **run.environment},
    )
    words = [line for line in done.stderr.splitlines() if "Error" in line] or [""]
    written = done.stdout.splitlines(keepends=True)
    first, *lines = [json.loads(line) for line in written if line.endswith("\n")] or [{}]
    if not first.get("engine"):
        sys.exit(f"{command[2]} is not installed in {command[0]}: {words[-1]}")
    return {line["way"]: line for line in lines}, words[-1][-300:]


async def server_verdicts(server: Server, num_requests: int) -> list[Verdict]:
    """Return a verdict on each number of requests at once."""
    prompts = texts(num_requests)

    async def found(at_once: int) -> list[tuple[int, Bits]]:
        room = asyncio.Semaphore(at_once)

        async def answer(index: int, prompt: str) -> tuple[int, Bits]:
            async with room:
                return index, await server.complete(index, prompt)

        return await asyncio.gather(*(answer(*each) for each in enumerate(prompts)))

    verdicts = []
    alone = dict(await found(1))
    has_logprobs = all(bits.logprobs or not bits.token_ids for bits in alone.values())
    evidence = "" if has_logprobs else "texts only"
    for at_once in (1, 2, 8, 64):
        start = time.monotonic()
        again = await found(at_once)
        name = "alone again" if at_once == 1 else f"{at_once} at once"
        seconds = time.monotonic() - start
        verdicts.append(verdict_of("", name, again, alone, evidence=evidence, seconds=seconds))
    return verdicts


async def ask_server(url: str, model: str | None, num_requests: int) -> list[Verdict]:
    """Return the verdicts on the server at `url`; `model` None is its first."""
    async with Server(url) as server:
        await server.choose(model)
        return await server_verdicts(server, num_requests)


def main() -> int:
    """Print a row for each way; return the exit status."""
    parser = make_parser("exactness", __doc__, model=False, rounds=None)
    parser.add_argument("engine", help=f"{', '.join(ENGINES)}, or a server's URL")
    parser.add_argument("--model", help="what the engine loads; of a server the name of the model")
    parser.add_argument("--python", default=sys.executable, help="the Python that has the engine")
    parser.add_argument("--num-requests", type=int, default=16)
    parser.add_argument("--ways", nargs="+", default=[], help="only those with one of these texts")
    parser.add_argument("--output", type=Path, help="also write the verdicts to this JSON file")
    args = parser.parse_args()
    if args.engine.startswith(("http://", "https://")):
        verdicts = iter(asyncio.run(ask_server(args.engine, args.model, args.num_requests)))
    elif args.engine in ENGINES and args.model:
        given = args.python, args.model, args.num_requests, args.ways
        verdicts = engine_verdicts(args.engine, *given)
    else:
        parser.error(f"give a URL, or one of {', '.join(ENGINES)} with --model")
    table = Table("way", "status", "differ", "in tokens", "of", "evidence", "seconds")
    found = []
    for each in verdicts:
        found.append(each)
        numbers = each.num_different, each.num_different_tokens, each.num_answers
        way = full_name(each.setting, each.way)
        table.row(way, each.status, *numbers, each.evidence, each.seconds)
    if args.output is not None:
        fields = {"command": sys.argv[1:], "verdicts": [dataclasses.asdict(v) for v in found]}
        args.output.write_text(json.dumps(fields, indent=1) + "\n", encoding="utf-8")
    return int(any(each.status == DIFFERS for each in found))


if __name__ == "__main__":
    sys.exit(main())
