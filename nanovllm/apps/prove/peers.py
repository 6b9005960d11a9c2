"""The same requests with another engine: one that is installed, or a server with OpenAI's API."""

import asyncio
import importlib.util
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence as Seq
from pathlib import Path
from typing import Any, NamedTuple

from nanovllm.apps.prove.proof import Proof, Verdict, full_name, verdict_of
from nanovllm.apps.prove.prove_options import ProveOptions
from nanovllm.apps.prove.requests import Bits, ProofRequest, Workload, as_bits, make_workload, texts
from nanovllm.apps.prove.ways import Calls
from nanovllm.errors import ConfigError, ServerError
from nanovllm.loading.hub import open_checkpoint
from nanovllm.loading.tokenizer import serving_tokenizer

_PROGRAM = Path(__file__).parent / "engines" / "program.py"
_LONGEST = 320
_BLOCK = 64
_SECONDS = 900.0
"""How long a server may take for one answer."""
OnVerdict = Callable[[Verdict], object]


class Run(NamedTuple):
    """An engine of a peer, in a process of its own.

    The first run of a setting has the way "alone", with which the others are compared.
    """

    options: dict[str, Any]
    ways: Mapping[str, Calls]
    setting: str = ""
    environment: Mapping[str, str] = {}
    evidence: str = ""
    """The count of the engine that must not be 0."""


def prove_engine(model: str, prove: ProveOptions, on_verdict: OnVerdict) -> Proof:
    """Try the ways that an installed engine has.

    Args:
        model: in a form that the engine reads; its tokenizer is read here.

    Raises:
        ConfigError: the engine's Python cannot be run, or the engine is not installed there.
        CheckpointError: the model's tokenizer cannot be read.
    """
    assert prove.peer is not None
    requests, all_, halves, _ = _workload(model, prove)
    runs = {"vllm": _vllm_runs, "transformers": _transformers_runs, "llamacpp": _llamacpp_runs}
    if prove.peer != "vllm":
        requests = [_greedy(request) for request in requests]
    proof = Proof(model)
    every = list(runs[prove.peer](all_, halves))
    prove.check_ways(full_name(run.setting, name) for run in every for name in run.ways)
    alone: dict[str, dict[int, Bits]] = {}
    for run in every:
        ways = {
            name: calls
            for name, calls in run.ways.items()
            if name == "alone" or prove.chooses(full_name(run.setting, name))
        }
        if ways and ("alone" in ways or run.setting in alone):
            proof.peer_options[full_name(run.setting, ", ".join(ways))] = run.options
            found = _answers(model, prove, run._replace(ways=ways), requests, proof)
            for verdict in _verdicts(run, found, alone, proof):
                proof.verdicts.append(verdict)
                on_verdict(verdict)
    return proof


def _verdicts(
    run: Run,
    found: Iterable[tuple[str, dict[str, Any] | str]],
    alone: dict[str, dict[int, Bits]],
    proof: Proof,
) -> Iterator[Verdict]:
    """Yield a verdict on each way of a run that has answers; keep those alone, by setting."""
    for name, line in found:
        called = full_name(run.setting, name)
        if isinstance(line, str):
            proof.not_tried.append(f"{called}: {line}")
            continue
        answers = [(index, as_bits(bits)) for index, bits in line["answers"]]
        if name == "alone":
            alone[run.setting] = dict(answers)
            proof.digests[run.setting] = [bits.digest for _, bits in answers]
            continue
        happened = line["counts"].get(run.evidence, 0)
        yield verdict_of(
            run.setting,
            name,
            answers,
            alone[run.setting],
            happened=happened > 0 or not run.evidence,
            evidence=f"{happened} {run.evidence}" if run.evidence else "",
            seconds=line["seconds"],
        )


def _workload(model: str, prove: ProveOptions) -> Workload:
    tokenizer = serving_tokenizer(open_checkpoint(model))
    if tokenizer is None:
        raise ConfigError(f"{model} has no tokenizer, so there are no prompts for a peer")
    vocab_size = len(tokenizer.get_vocab())
    return make_workload(prove.num_requests, vocab_size, _BLOCK, _LONGEST, tokenizer.encode)


def _greedy(request: ProofRequest) -> ProofRequest:
    params = {"temperature": 0.0, "max_tokens": request.params["max_tokens"], "ignore_eos": True}
    return request._replace(params=params)


def _by(size: int, indices: Seq[int]) -> Calls:
    return tuple(tuple(indices[at : at + size]) for at in range(0, len(indices), size))


def _batches(all_: tuple[int, ...], halves: tuple[int, ...]) -> dict[str, Calls]:
    return {
        "alone": _by(1, (*all_, *halves)),
        "alone again": _by(1, all_[::-1]),
        "batches of 2": _by(2, all_),
        "batches of 5": _by(5, all_),
        "batches of 64": _by(64, all_),
    }


def _vllm_runs(all_: tuple[int, ...], halves: tuple[int, ...]) -> Iterator[Run]:
    yield from _vllm_setting(all_, halves, "", {})
    mode = {"VLLM_BATCH_INVARIANT": "1"}
    yield from _vllm_setting(all_, halves, "batch-invariant mode", mode)


def _vllm_setting(
    all_: tuple[int, ...], halves: tuple[int, ...], setting: str, environment: dict[str, str]
) -> Iterator[Run]:
    base = {
        "max_model_len": _LONGEST,
        "enforce_eager": True,
        "enable_prefix_caching": False,
        "max_num_seqs": 64,
        "max_num_batched_tokens": 1024,
        "disable_log_stats": False,
    }
    few = {"num_gpu_blocks_override": -(-_LONGEST // 128) + 1, "block_size": 128}
    drafts = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4}
    warm = {"half warm": (halves, all_), "warm": (all_, all_)}
    one = {"VLLM_CPU_OMP_THREADS_BIND": "0"}

    def run(
        more: dict[str, Any],
        ways: Mapping[str, Calls],
        evidence: str = "",
        variables: Mapping[str, str] = {},
    ) -> Run:
        return Run({**base, **more}, ways, setting, {**environment, **variables}, evidence)

    yield run({}, _batches(all_, halves))
    yield run({"max_num_seqs": 8, "max_num_batched_tokens": 32}, {"chunks of 32 tokens": (all_,)})
    yield run({"enable_prefix_caching": True}, warm, "cached tokens")
    yield run({"max_num_seqs": 8, **few}, {"preempted": (all_,)}, "preemptions")
    yield run({"speculative_config": drafts}, {"n-gram drafts": (all_,)}, "accepted drafts")
    yield run({}, {"1 CPU thread": (all_,)}, variables=one)


def _transformers_runs(all_: tuple[int, ...], halves: tuple[int, ...]) -> Iterator[Run]:
    yield Run({}, _batches(all_, halves))
    yield Run({"num_threads": 1}, {"1 CPU thread": _by(1, all_)})
    yield Run({"prompt_lookup_num_tokens": 4}, {"n-gram drafts": _by(1, all_)})


def _llamacpp_runs(all_: tuple[int, ...], halves: tuple[int, ...]) -> Iterator[Run]:
    base = {"num_seqs": min(64, len(all_)), "longest": _LONGEST}
    yield Run(base, _batches(all_, halves))
    yield Run({**base, "chunk": 17}, {"chunks of 17 tokens": _by(1, all_)})
    yield Run({**base, "again": True}, {"warm": _by(1, all_)})
    yield Run({**base, "num_threads": 1}, {"1 CPU thread": _by(1, all_)})


def _answers(
    model: str, prove: ProveOptions, run: Run, requests: Seq[ProofRequest], proof: Proof
) -> Iterator[tuple[str, dict[str, Any] | str]]:
    """Yield each way of a run with the program's line about it, or with why there is none."""
    job = {
        "model": model,
        "options": run.options,
        "requests": [request[:2] for request in requests],
        "ways": list(run.ways.items()),
    }
    assert prove.peer is not None
    command = [prove.peer_python or sys.executable, str(_PROGRAM), prove.peer]
    environment = {**os.environ, **run.environment}
    try:
        done = subprocess.run(
            command,
            input=json.dumps(job),
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            env=environment,
        )
    except OSError as error:
        raise ConfigError(
            f"peer_python {command[0]!r} cannot be run: {error.strerror or error}; give the Python "
            f"in which {prove.peer} is installed"
        ) from None
    written = done.stdout.splitlines(keepends=True)
    lines = [json.loads(line) for line in written if line.endswith("\n")]  # a killed one stops
    if not lines:
        raise ConfigError(
            f"{prove.peer} does not run in {command[0]!r}: {_last_line(done.stderr)}; give the "
            "Python in which it is installed as peer_python"
        )
    proof.engine = lines[0]["engine"]
    found = {line["way"]: line for line in lines[1:]}
    for name in run.ways:
        yield name, found.get(name, _last_line(done.stderr))


def _last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if "Error" in line] or text.splitlines()
    return lines[-1][-300:] if lines else "it says nothing"


def prove_server(model: str | None, prove: ProveOptions, on_verdict: OnVerdict) -> Proof:
    """Send the requests to a server one after the other, and several at once.

    Args:
        model: None: the server's first.

    Raises:
        ServerError: the server cannot be reached, refuses a request, or answers in another form.
        ConfigError: httpx is not installed.
    """
    if importlib.util.find_spec("httpx") is None:
        raise ConfigError("httpx is not installed: pip install -e '.[client]' -c constraints.txt")
    return asyncio.run(_prove_server(model, prove, on_verdict))


async def _prove_server(model: str | None, prove: ProveOptions, on_verdict: OnVerdict) -> Proof:
    assert prove.peer is not None
    owner = "a server"
    prompts = texts(prove.num_requests)
    async with _Server(prove.peer, prove.api_key) as server:
        if model is None:
            model, owner = await server.first_model(owner)
        proof = Proof(model, engine=f"{owner} at {prove.peer}")

        async def answers(at_once: int) -> list[tuple[int, Bits]]:
            room = asyncio.Semaphore(at_once)

            async def answer(index: int, prompt: str) -> tuple[int, Bits]:
                async with room:
                    return index, await server.complete(model, index, prompt)

            return await asyncio.gather(*(answer(*each) for each in enumerate(prompts)))

        alone = dict(await answers(1))
        proof.digests[""] = [bits.digest for bits in alone.values()]
        has_logprobs = all(bits.logprobs or not bits.token_ids for bits in alone.values())
        for at_once in (1, 2, 8, 64):
            name = "alone again" if at_once == 1 else f"{at_once} at once"
            start = time.monotonic()
            found = await answers(at_once)
            verdict = verdict_of(
                "",
                name,
                found,
                alone,
                evidence="" if has_logprobs else "texts only",
                seconds=time.monotonic() - start,
            )
            proof.verdicts.append(verdict)
            on_verdict(verdict)
    return proof


class _Server:
    """A server with OpenAI's API.

    Args:
        api_key: None is the environment variable OPENAI_API_KEY.
    """

    def __init__(self, url: str, api_key: str | None) -> None:
        import httpx

        key = api_key or os.environ.get("OPENAI_API_KEY")
        self._url = url.rstrip("/").removesuffix("/v1")
        self._errors = (httpx.HTTPError, httpx.InvalidURL, ValueError)
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._client = httpx.AsyncClient(headers=headers, timeout=_SECONDS, trust_env=False)

    async def __aenter__(self) -> "_Server":
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._client.aclose()

    async def first_model(self, owner: str) -> tuple[str, str]:
        """Return the id of the first model, and who has it: `owner` if that is not said."""
        found = await self._call("GET", "/v1/models")
        try:
            first = found["data"][0]
            return str(first["id"]), str(first.get("owned_by", owner))
        except (AttributeError, LookupError, TypeError):
            raise _not_as_expected("/v1/models", found) from None

    async def complete(self, model: str, index: int, prompt: str) -> Bits:
        """Return the bits of a completion; its tokens are the bytes of its text."""
        body = {
            "model": model,
            "prompt": prompt,
            "max_tokens": 16 + index % 33,
            "temperature": 0.8 * (index % 2),
            "seed": index,
            "logprobs": 2,
        }
        found = await self._call("POST", "/v1/completions", body)
        try:
            choice = found["choices"][0]
            text = choice["text"].encode("utf-8", "replace")
            logprobs = choice.get("logprobs") or {}
            values = logprobs.get("token_logprobs")
            if values is None:  # llama.cpp's form
                values = [each["logprob"] for each in logprobs.get("content") or ()]
            at_tokens = tuple(((0, float(value)),) for value in values)
        except (AttributeError, LookupError, TypeError, ValueError):
            raise _not_as_expected("/v1/completions", found) from None
        if any(math.isnan(value) for ((_, value),) in at_tokens):
            raise ServerError(f"/v1/completions: a log-probability of request {index} is NaN")
        return Bits(tuple(text), at_tokens, ())

    async def _call(self, method: str, path: str, body: Any = None) -> Any:
        import httpx

        try:
            response = await self._client.request(method, self._url + path, json=body)
            response.raise_for_status()
            return response.json()
        except httpx.HTTPStatusError as error:
            text = error.response.text[:300]
            raise ServerError(f"{path}: status {error.response.status_code}: {text}") from None
        except self._errors as error:
            reason = str(error) or type(error).__name__
            raise ServerError(f"{self._url}: {reason}; is the server running?") from None


def _not_as_expected(path: str, found: Any) -> ServerError:
    return ServerError(f"{path}: not an answer of OpenAI's API: {json.dumps(found)[:300]}")
