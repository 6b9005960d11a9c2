"""Computes requests in one way: makes the engines, calls `generate`, and counts what happened."""

import tempfile
from collections import Counter
from collections.abc import Sequence as Seq
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from multiprocessing import get_context
from typing import Any, NamedTuple

from nanovllm.apps.prove.requests import Bits, ProofRequest, bits_of
from nanovllm.apps.prove.ways import Way
from nanovllm.errors import EngineDeadError
from nanovllm.llm import LLM
from nanovllm.options.lora_request import LoRARequest
from nanovllm.options.sampling_params import SamplingParams


class WayAnswers(NamedTuple):
    """What the engines of a way answered."""

    answers: list[tuple[int, Bits]]
    """(index of the request, its answer), in the order of the calls."""
    counts: Counter[str]


def run(
    model: str,
    options: dict[str, Any],
    way: Way,
    requests: Seq[ProofRequest],
    adapters: Seq[LoRARequest] = (),
) -> WayAnswers:
    """Compute the calls of a way.

    Args:
        options: those of the setting; the way's are added.

    Raises:
        NanoVLLMError: the model does not run with these options.
    """
    options = {**options, **way.options}
    answers: list[tuple[int, Bits]] = []
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory(prefix="nanovllm-prove-") as directory:
        if way.keeps_files:
            options["kv_cache_dir"] = directory
        if way.elsewhere:
            here = way._replace(elsewhere=False)
            try:
                with ProcessPoolExecutor(1, get_context("spawn")) as pool:
                    return pool.submit(run, model, options, here, requests, adapters).result()
            except BrokenProcessPool as error:
                raise EngineDeadError(f"another process failed: {error}") from error
        for calls in way.engines:
            llm = LLM(model, **options)
            try:
                do_what_does_not_pay(llm)
                if way.reloads:
                    paths = [each.path for each in (*adapters[1:], adapters[0])]
                    others = [
                        replace(each, lora_path=path)
                        for each, path in zip(adapters, paths, strict=True)
                    ]
                    generate(llm, requests, calls[0], others)
                loaded = [replace(each, load_inplace=way.reloads) for each in adapters]
                for call in calls:
                    answers += zip(call, generate(llm, requests, call, loaded), strict=True)
                counts.update(_counts(llm))
            finally:
                llm.shutdown()
    return WayAnswers(answers, counts)


def generate(
    llm: LLM, requests: Seq[ProofRequest], call: Seq[int], adapters: Seq[LoRARequest] = ()
) -> list[Bits]:
    """Generate the requests with these indices in one call; return their bits."""
    chosen = [requests[index] for index in call]
    outputs = llm.generate(
        [request.given for request in chosen],
        [SamplingParams(**request.params) for request in chosen],
        use_tqdm=False,
        lora_request=[
            None if request.adapter is None else adapters[request.adapter] for request in chosen
        ],
    )
    for output in outputs:
        completion = output.outputs[0]
        if completion.finish_reason == "error":
            raise EngineDeadError(f"a request ended with an error: {completion.stop_reason}")
    return [bits_of(output) for output in outputs]


def do_what_does_not_pay(llm: LLM) -> None:
    """Let the engine draft, and load KV from tiers, whenever it can: not only where that pays."""
    scheduler = llm.engine.scheduler
    if scheduler.drafting is not None:
        scheduler.drafting.controller.takes_all = True
    if scheduler.stats.tiers is not None:
        from nanovllm.features.tiers.loads import LoadHook

        for hook in scheduler.hooks:
            if isinstance(hook, LoadHook):
                hook.traffic.token_seconds = 0.0  # unknown


def _counts(llm: LLM) -> Counter[str]:
    """Return what happened since the engine started, by the names that `Way.evidence` has."""
    scheduler = llm.engine.scheduler
    stats = scheduler.stats
    found = Counter(
        {
            "steps": stats.step_sizes.total(),
            "cached tokens": stats.num_cached_tokens,
            "preemptions": stats.num_preemptions,
        }
    )
    if scheduler.drafting is not None:
        drafts = scheduler.drafting.counts
        found["drafts"] = drafts.num_draft_tokens
        found["accepted drafts"] = drafts.num_accepted_tokens
    if stats.tiers is not None:
        found["tokens from host memory"] = stats.tiers.num_host_tokens
        found["tokens from files"] = stats.tiers.num_store_tokens
    return found
