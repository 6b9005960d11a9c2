"""What benchmarks.gpu does without a GPU: workloads, floors, traces and its tables."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import shapes
from benchmarks.gpu import floors, report, trace

HERE = Path(__file__).parent
SAMPLE = HERE / "kineto_sample.json"
"""Five steps of a small graph, as torch.profiler exports them; the third uploads a block before."""


def test_the_workload_is_nano_vllms() -> None:
    prompts, output_lens = floors.workload()
    assert sum(map(len, prompts)) == 142_827
    assert sum(output_lens) == 133_966


def test_what_the_workload_reads() -> None:
    config = shapes.CONFIGS["Qwen3-0.6B"]
    prompts, output_lens = floors.workload()
    assert shapes.kv_bytes(config) == 114_688
    moved = floors.tokens_read(map(len, prompts), output_lens) * 114_688
    assert moved == pytest.approx(13.85e12, rel=1e-3)


def test_tokens_read_step_by_step() -> None:
    prompt_lens, output_lens = [5, 1, 9], [4, 1, 7]
    expected = sum(
        prompt + made
        for prompt, out in zip(prompt_lens, output_lens, strict=True)
        for made in range(1, out)
    )
    assert floors.tokens_read(prompt_lens, output_lens) == expected


@pytest.mark.parametrize("name", ["Qwen3-0.6B", "Qwen3-8B", "Qwen3-32B", "Qwen3.5-0.8B"])
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


def test_weights_of_experts_that_a_step_reads() -> None:
    heads, kv_heads, head_dim, hidden = 16, 8, 128, 1024
    attention = (2 * heads + 2 * kv_heads) * head_dim * hidden
    router, chosen = 64 * hidden, 8 * 3 * 384 * hidden
    head = 151936 * hidden
    layers = 16 * (attention + chosen)
    config = shapes.CONFIGS["Qwen3-MoE-64"]
    assert shapes.weight_bytes(config) == 2 * (layers + 16 * router + head)
    in_int8 = layers + head
    expected = in_int8 * shapes.WEIGHT_BITS["int8"] / 8 + 2 * 16 * router
    assert shapes.weight_bytes(config, "int8") == pytest.approx(expected)


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


def test_nothing_idle() -> None:
    assert trace.idle(kernels((5, 10), (6, 7), (10, 12))) == (0, 0)


def test_settled() -> None:
    rest = trace.settled(kernels((0, 10), (19, 30), (20, 40), (90, 100)))
    assert [round(kernel.start * 1e6) for kernel in rest] == [20, 90]
    assert trace.settled([]) == []


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


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("_plan_decode", "decode attention"),
        ("void flash_fwd_kernel<cutlass::bfloat16_t>", "attention of others"),
        ("_add_rms_norm", "ops"),
        ("_advance", "decode step"),
        ("void cublasLt::splitKreduce_kernel", "GEMM"),
        ("void at::native::elementwise_kernel", "other"),
    ],
)
def test_kinds(name: str, kind: str) -> None:
    assert trace.kind_of(name) == kind


def test_one_step_of_a_sample() -> None:
    kernels = trace.kernels_of_trace(json.loads(SAMPLE.read_text()))
    nodes = trace.one_step(kernels, 5)
    assert len(nodes) == 14
    assert [node.name for node in nodes[:5]] == [
        "_gather",
        "_add_rms_norm",
        "nvjet_tst_64x8_64x16_4x1_v_bz_TNT",
        "_store",
        "_decode",
    ]
    assert nodes[-1].name == "Memcpy DtoH (Device -> Pinned)"
    # 3.2, 3.2 and 3.3 us. The second step ends with an upload, so it does not count.
    assert nodes[2].duration == pytest.approx(3.2333e-6, abs=2e-9)
    assert nodes[2].gap == pytest.approx(1.1e-6, abs=2e-9)
    rows = trace.by_name(nodes)
    decode = next(row for row in rows if row["name"] == "_decode")
    assert decode["count"] == 2
    assert decode["seconds"] == pytest.approx(8e-6, abs=4e-9)
    assert decode["gaps"] == pytest.approx(2.2e-6, abs=4e-9)


def test_a_trace_without_steps() -> None:
    with pytest.raises(ValueError, match="no kernel runs once in each of 40 steps"):
        trace.one_step(kernels((0, 1), (2, 3)), 40)
    with pytest.raises(ValueError, match="no whole step that begins with k"):
        trace.one_step(kernels((0, 1)), 1)


def test_gaps_of_overlapping_kernels() -> None:
    found = trace.gaps(kernels((0, 10), (8, 12), (9, 11), (13, 14)))
    assert [round(gap * 1e6) for gap in found] == [0, -2, -3, 1]


RESULTS: dict[str, Any] = json.loads((HERE / "gpu_results.json").read_text())
"""Invented figures of each part, some with errors."""
LINES = (
    "# NVIDIA H200",
    "| torch | 2.11 |",
    "| nano | done | 9 | 60 |",
    "| bfloat16 | 24 | 960 | 0.00130 | 0.0880 | 0.00120, 0.0900 | 24 | right |",
    "| bfloat16 | 1 | 240 | 0.50000 | 1.5000 | 0.00120, 0.0900 | 1 | WRONG |",
    "- float32: OutOfMemoryError: 1 | 2",
    "3 files: 4 passed, 2 failed, 0 errors, 1 skipped.",
    "| tests/b.py | exit status 1 | 1 | 2 | 0 | 0 | x: a b |",
    "| tests/c.py | out of time | 0 | 0 | 0 | 0 | no time |",
    "| copy | 4.00 TB/s |",
    "| 100 | 1 | none | 0.600 | 0.301 | 50% |",
    "Left out, because the time was over: queue depth 2.",
    "| measured | 0.50 | 80 |",
    "| triton | 256 x 1 of 600, 512 shared | 200.0 | 3.00 | 75% | 20 |",
    "| triton | 1 x 64 of 600 | OutOfResources: 1 \\| 2 |  |  |  |",
    "| flash-attn |  | not installed |  |  |  |",
    "| 64 | 1.000 | 2.000 | 28 | 12.5% | 1.5% | GEMM 50%, other 10% |",
    "| `_decode` | 28 | 20.00 | 1.00 | 588.00 |",
    "| sum | 28 | 560.00 | 28.00 | 588.00 |",
    "no kernel runs once",
    "| Qwen3-8B |  | 64 x 300 | 8.00 | 4.49 | 8,000 | 56% |",
    "| Qwen3-8B | quantization=fp8 | 64 x 300 | 5.00 | – | 12,800 | – |",
    "| Qwen3-32B |  | OutOfMemoryError: no |  |  |  |  |",
    "| transformers | 5.00, 6.00 | 182 | 4.00 |",
    "| other | no round ended | – | – |",
    "- vllm: ModuleNotFoundError: No module",
)
"""Lines of the page of RESULTS."""


def call_of(results: dict[str, Any]) -> dict[str, Any]:
    ended = {"ended": "done", "seconds": 9.0, "limit": 60.0}
    return {
        "machine": {"GPU": "NVIDIA H200", "torch": "2.11"},
        "command": f"python -m benchmarks.gpu --parts {','.join(results)}",
        "results": {name: {**part, **ended} for name, part in results.items()},
    }


def test_page() -> None:
    assert list(RESULTS) == list(report.PARTS)
    page = report.page([json.loads(json.dumps(call_of(RESULTS)))])
    for line in LINES:
        assert line in page.splitlines(), line
    assert "the median is **80 output tokens/s**" in page
    for head, rule in re.findall(r"^(\|.*\|)\n(\| ---.*\|)$", page, re.MULTILINE):
        assert head.count("|") == rule.count("|")


def test_every_row_of_a_table_has_as_many_cells() -> None:
    page = report.page([call_of(RESULTS)])
    for lines in re.findall(r"(?:^\|.*\|\n)+", page, re.MULTILINE):
        cells = {len(re.findall(r"(?<!\\)\|", line)) for line in lines.splitlines()}
        assert len(cells) == 1, lines


@pytest.mark.parametrize("part", [name for name in RESULTS if name != "bandwidth"])
def test_page_of_one_part_without_bandwidth(part: str) -> None:
    page = report.page([call_of({part: RESULTS[part]})])
    assert report.PARTS[part].title in page
    assert "Not enough" not in page


def test_page_of_parts_that_recorded_little() -> None:
    nano = {key: RESULTS["nano"][key] for key in ("model", "prompt_lens", "output_lens")}
    peers = {**RESULTS["peers"], "rounds": {}}
    results = {"bandwidth": {}, "nano": nano, "single": {"left_out": ["a"]}, "peers": peers}
    results["step"] = {"nothing": 1}
    page = report.page([call_of(results)])
    assert "No run ended." in page
    assert "Left out, because the time was over: a." in page
    assert "Not enough was recorded for a table: there is no 'unprofiled'." in page


def test_a_page_of_two_calls(tmp_path: Path) -> None:
    calls = [call_of({name: RESULTS[name]}) for name in ("bandwidth", "models")]
    paths = []
    for number, call in enumerate(calls):
        paths.append(tmp_path / f"{number}.json")
        paths[-1].write_text(json.dumps(call))
    output = tmp_path / "page.md"
    report.main([*map(str, paths), "-o", str(output)])
    page = output.read_text()
    assert "## Call 1: bandwidth" in page
    assert "## Call 2: models" in page
    assert page.count("| torch | 2.11 |") == 2
    assert "| Qwen3-8B |  | 64 x 300 | 8.00 | – | 8,000 | – |" in page  # of another call
