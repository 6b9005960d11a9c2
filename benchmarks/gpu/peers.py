"""Part `peers`: this engine and others in turn, on the same requests."""

import argparse
import contextlib
import inspect
import time
from collections.abc import Callable, Mapping
from statistics import median
from typing import Any

from bench import Prompts, vllm as start_vllm
from benchmarks.gpu.engines import model_path
from benchmarks.gpu.floors import workload
from benchmarks.gpu.part import Part, Record, describe, table
from benchmarks.shapes import SMALL

Run = Callable[[Prompts, list[int]], None]
"""Takes prompts and output lengths."""


def peers(record: Record) -> None:
    """Run three rounds of as many requests as the time allows."""
    record.figures |= {"requests": 0, "tokens": 0, "rounds": {}, "absent": {}}
    with contextlib.ExitStack() as stack:
        engines: dict[str, Run] = {}
        trial, lens = workload(32)
        round_seconds = 0.0
        for name, make in PEERS.items():
            try:
                run = make(model_path(record, SMALL), stack)
                run(trial[:2], [8, 8])
                start = time.perf_counter()
                run(trial, lens)
                round_seconds += time.perf_counter() - start
                engines[name] = run
            except Exception as error:
                record.figures["absent"][name] = describe(error)
            record.save()
        record.figures["absent"]["nano-vllm"] = "its package has the name of ours"
        # A batch of 8 times the requests takes at most 8 times as long.
        sizes = (256, 128, 64, 32)
        fitting = (n for n in sizes if 3 * round_seconds * n / 32 < record.left() - 5)
        prompts, output_lens = workload(next(fitting, sizes[-1]))
        record.figures |= {"requests": len(prompts), "tokens": sum(output_lens)}
        record.figures["rounds"] = {name: [] for name in engines}
        for _ in range(3):
            for name, run in engines.items():
                start = time.perf_counter()
                run(prompts, output_lens)
                record.figures["rounds"][name].append(time.perf_counter() - start)
                record.save()


def ours(model: str, stack: contextlib.ExitStack) -> Run:
    """Start this engine; its KV pool fits the whole workload and leaves memory to the others."""
    from nanovllm import LLM, SamplingParams

    llm = LLM(
        model, load_format="dummy", enable_prefix_caching=False, kv_cache_memory_bytes=36 * 10**9
    )

    def run(prompts: Prompts, output_lens: list[int]) -> None:
        params = [
            SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=length)
            for length in output_lens
        ]
        llm.generate(prompts, params, use_tqdm=False)

    return run


def transformers(model: str, stack: contextlib.ExitStack) -> Run:
    """Start transformers' continuous batching. Its arguments differ between releases."""
    manager = continuous_batching(model)
    if hasattr(manager, "warmup"):
        manager.warmup()
    manager.start()
    stack.callback(manager.stop, block=True, timeout=5)
    takes_eos = "eos_token_id" in inspect.signature(manager.add_request).parameters
    eos = {"eos_token_id": -1} if takes_eos else {}

    def run(prompts: Prompts, output_lens: list[int]) -> None:
        expected = {
            manager.add_request(prompt, max_new_tokens=length, **eos): length
            for prompt, length in zip(prompts, output_lens, strict=True)
        }
        while expected:
            result = manager.get_result(timeout=1)
            if result is None and not manager.is_running():
                raise RuntimeError("its generation thread has ended")
            if result is None or not result.is_finished():
                continue
            length = expected.pop(result.request_id)
            if result.error is not None or len(result.generated_tokens) != length:
                found = len(result.generated_tokens)
                raise RuntimeError(f"{found} of {length} tokens, error {result.error}")

    return run


def continuous_batching(model: str) -> Any:
    """Return transformers' manager for a model with random weights, without prefix caching."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    with torch.device("cuda"):
        config = AutoConfig.from_pretrained(model)
        hf = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    generation_config = GenerationConfig(
        max_new_tokens=1024,
        do_sample=True,
        temperature=0.6,
        top_k=0,
        top_p=1.0,
        eos_token_id=-1,
        pad_token_id=0,
    )
    options: dict[str, Any] = {"generation_config": generation_config}
    with contextlib.suppress(ImportError):
        from transformers import ContinuousBatchingConfig

        # Every round has the same prompts, so no engine may cache prefixes.
        options["continuous_batching_config"] = ContinuousBatchingConfig(allow_block_sharing=False)
    return hf.init_continuous_batching(**options)


def vllm(model: str, stack: contextlib.ExitStack) -> Run:
    """Start vLLM on 45% of the GPU's memory."""
    options = {"gpu_memory_utilization": 0.45}
    args = {"load_format": "dummy", "max_model_len": 4096, "json": True}
    run = start_vllm(model, argparse.Namespace(**args, option=options))
    return lambda prompts, output_lens: run(prompts, output_lens, {"temperature": 0.6})


PEERS: dict[str, Callable[[str, contextlib.ExitStack], Run]] = {
    "nanovllm": ours,
    "transformers": transformers,
    "vllm": vllm,
}


def lines(figures: Mapping[str, Any], bandwidth: Mapping[str, Any]) -> list[str]:
    """Return a table of the engines' times, and the reasons why others are absent."""
    text = [
        f"{figures['requests']} requests of the workload, {figures['tokens']:,} tokens out, the "
        "engines in turn; seconds of each round.",
        "",
    ]
    own_times = figures["rounds"].get("nanovllm", [])
    rows = []
    for name, times in figures["rounds"].items():
        if not times or not own_times:
            rows.append([name, "no round ended", "–", "–"])
            continue
        ratio = median(peer / own for peer, own in zip(times, own_times, strict=False))
        rate = figures["tokens"] / median(times)
        rows.append([name, ", ".join(f"{t:.2f}" for t in times), f"{rate:,.0f}", f"{ratio:.2f}"])
    text += table(["engine", "seconds", "tokens/s", "time / our time"], rows)
    text += ["", *(f"- {name}: {reason}" for name, reason in figures["absent"].items())]
    return text


PART = Part(peers, 110, "Beside other engines", lines)
