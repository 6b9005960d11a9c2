"""What benchmarks.gpu does without a GPU: workloads, floors, traces and its tables."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import shapes
from benchmarks.gpu import floors, report, trace


def test_the_workload_is_nano_vllms() -> None:
    config = shapes.CONFIGS["Qwen3-0.6B"]
    prompts, output_lens = floors.workload()
    assert sum(map(len, prompts)) == 142_827
    assert sum(output_lens) == 133_966
    assert shapes.kv_bytes(config) == 114_688
    moved = floors.tokens_read(map(len, prompts), output_lens) * 114_688
    assert moved == pytest.approx(13.85e12, rel=1e-3)


@pytest.mark.parametrize("name", ["Qwen3-0.6B", "Qwen3-8B", "Qwen3.5-0.8B"])
def test_weights_that_a_step_reads(name: str) -> None:
    from nanovllm.models.registry import model_class, read_config

    config = shapes.CONFIGS[name]
    model_config = read_config(config)
    with torch.device("meta"):
        model = model_class(model_config)(model_config, 64)
    matrices = {
        parameter.data_ptr() or id(parameter): parameter.numel()
        for parameter in model.parameters()
        if parameter.ndim == 2
    }
    numbers = sum(matrices.values())
    if not config["tie_word_embeddings"]:  # a step reads one row per token of the embedding
        numbers -= config["vocab_size"] * config["hidden_size"]
    assert shapes.weight_bytes(config) == 2 * numbers


def test_floor() -> None:
    config = shapes.CONFIGS["Qwen3-0.6B"]
    floor = floors.workload_floor(config, [10, 20], [5, 3], 1e12, 1e15)
    head = 151936 * 1024
    layers = shapes.weight_bytes(config) // 2 - head
    assert floor["weights"] == pytest.approx(4 * 2 * (layers + head) / 1e12)
    assert floor["KV"] == pytest.approx((11 + 12 + 13 + 14 + 21 + 22) * 114_688 / 1e12)
    assert floor["prompts"] == pytest.approx(2 * layers * 30 / 1e15)
    assert floor["all"] == pytest.approx(floor["weights"] + floor["KV"] + floor["prompts"])


def kernels(*intervals: tuple[float, float]) -> list[Any]:
    """Return kernels that start and end at these microseconds."""
    return [trace.Kernel("k", start * 1e-6, end * 1e-6) for start, end in intervals]


def test_idle() -> None:
    # Idle: 40 to 42, and a pause from 50 to 80. The third kernel overlaps the second.
    found = trace.idle(kernels((0, 40), (42, 50), (45, 48), (80, 100)))
    assert found.all == pytest.approx(0.32)
    assert found.paused == pytest.approx(0.30)


def test_settled() -> None:
    rest = trace.settled(kernels((0, 10), (19, 30), (20, 40), (90, 100)))
    assert [round(kernel.start * 1e6) for kernel in rest] == [20, 90]


def test_trace() -> None:
    events = [
        {"ph": "X", "cat": "kernel", "name": "_decode", "ts": 20.0, "dur": 60.0},
        {"ph": "X", "cat": "kernel", "name": "nvjet_tst_64x8", "ts": 0.0, "dur": 20.0},
        {"ph": "X", "cat": "cuda_runtime", "name": "cudaGraphLaunch", "ts": 0.0, "dur": 500.0},
        {"ph": "X", "cat": "gpu_memcpy", "name": "Memcpy DtoH", "ts": 90.0, "dur": 10.0},
        {"ph": "i", "cat": "kernel", "name": "mark", "ts": 0.0},
    ]
    found = trace.kernels_of_trace({"traceEvents": events})
    assert [kernel.name for kernel in found] == ["nvjet_tst_64x8", "_decode", "Memcpy DtoH"]
    shares = trace.shares(found)
    assert {kind: round(share, 6) for kind, share in shares.items() if share} == {
        "decode attention": 0.6,
        "GEMM": 0.2,
        "copies": 0.1,
        "idle": 0.1,
    }


def test_one_step() -> None:
    """Steps of three kernels, which the host begins; the second one also uploads a block."""
    found = []
    for step in range(4):
        at = 100e-6 * step
        found += [
            trace.Kernel("gather", at, at + 2e-6),
            trace.Kernel("decode", at + 3e-6, at + 9e-6),
        ]
        if step == 1:
            found.append(trace.Kernel("Memcpy HtoD", at + 10e-6, at + 11e-6))
        found.append(trace.Kernel("decode", at + 20e-6, at + 30e-6))
    nodes = trace.one_step(found, 4)
    assert [node.name for node in nodes] == ["gather", "decode", "decode"]
    assert [round(node.duration * 1e6) for node in nodes] == [2, 6, 10]
    assert [round(node.gap * 1e6) for node in nodes][1:] == [1, 11]
    decode = trace.by_name(nodes)[1]
    assert (decode["count"], round(decode["seconds"] * 1e6), round(decode["gaps"] * 1e6)) == (
        2,
        16,
        12,
    )
    with pytest.raises(ValueError, match="no kernel runs once in each of 40 steps"):
        trace.one_step(found, 40)


NANO = {"model": "Qwen3-0.6B", "prompt_lens": [9], "output_lens": [5]}
"""Invented figures of a part, which was cut before its first run."""


def call_of(results: dict[str, Any]) -> dict[str, Any]:
    ended = {"ended": "done", "seconds": 9.0, "limit": 60.0}
    return {
        "machine": {"GPU": "NVIDIA H200", "torch": "2.11"},
        "command": f"python -m benchmarks.gpu --parts {','.join(results)}",
        "results": {name: {**part, **ended} for name, part in results.items()},
    }


def test_a_page_of_two_calls_that_recorded_little(tmp_path: Path) -> None:
    calls = [
        {"bandwidth": {}, "nano": NANO},
        {"single": {"left_out": ["a"]}, "step": {"nothing": 1}},
    ]
    paths = []
    for number, results in enumerate(calls):
        paths.append(tmp_path / f"{number}.json")
        paths[-1].write_text(json.dumps(call_of(results)))
    output = tmp_path / "page.md"
    report.main([*map(str, paths), "-o", str(output)])
    page = output.read_text()
    assert "## Call 1: bandwidth, nano" in page
    assert "No run ended." in page
    assert "Left out, because the time was over: a." in page
    assert "Not enough was recorded for a table: there is no 'unprofiled'." in page
    assert page.count("| torch | 2.11 |") == 2
    for lines in re.findall(r"(?:^\|.*\|\n)+", page, re.MULTILINE):
        cells = {len(re.findall(r"(?<!\\)\|", line)) for line in lines.splitlines()}
        assert len(cells) == 1, lines
