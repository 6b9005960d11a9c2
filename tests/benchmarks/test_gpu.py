"""What benchmarks.gpu does without a GPU: floors, idle time, the page, and its error."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import shapes
from benchmarks.gpu import attention, floors, report, tests, trace

ROOT = Path(__file__).parent.parent.parent


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


@pytest.mark.parametrize("name", ["Qwen3-0.6B", "Qwen3-8B", "Qwen3-32B"])
def test_weights_that_a_step_reads(name: str) -> None:
    from nanovllm.models.config import ModelConfig
    from nanovllm.models.registry import model_class

    config = shapes.CONFIGS[name]
    model_config = ModelConfig.from_hf(config)
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
        "attention": 0.6,
        "GEMM": 0.2,
        "copies": 0.1,
        "idle": 0.1,
    }


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("_plan_decode", "attention"),
        ("void flash_fwd_kernel<cutlass::bfloat16_t>", "attention"),
        ("_reduce_blocks", "sampler"),
        ("_add_rms_norm", "norm, activation, store"),
        ("_advance", "step state"),
        ("void cublasLt::splitKreduce_kernel", "GEMM"),
        ("void at::native::elementwise_kernel", "other"),
    ],
)
def test_kinds(name: str, kind: str) -> None:
    assert trace.kind_of(name) == kind


def test_our_kernels_have_a_kind() -> None:
    import re

    for path in (ROOT / "nanovllm" / "kernels" / "triton").glob("*.py"):
        source = path.read_text(encoding="utf-8")
        for name in re.findall(r"\b(_\w+)\[\s*[\w(]", source):
            if re.search(rf"^def {name}\(", source, re.MULTILINE):
                assert trace.kind_of(name) != "other", name


RESULTS: dict[str, Any] = {
    "tests": {
        "files": {
            "tests/a.py": {
                "passed": 3,
                "failed": 0,
                "errors": 0,
                "skipped": 1,
                "ended": "passed",
                "failures": [],
            },
            "tests/b.py": {
                "passed": 1,
                "failed": 2,
                "errors": 0,
                "skipped": 0,
                "ended": "exit status 1",
                "failures": ["x: assert 0"],
            },
        },
        "sanitizer": {"tests/k.py": "exit status 0; ERROR SUMMARY: 0 errors"},
    },
    "bandwidth": {"copy": 4e12, "read": 4.5e12, "matmul": 7e14},
    "attention": {
        "rows": [
            {
                "backend": "triton",
                "options": "",
                "batch": 256,
                "length": 600,
                "seconds": 200e-6,
                "bytes": 600_000_000,
            },
            {"backend": "triton", "options": "N=128", "error": "OutOfResources: 1 | 2"},
        ]
    },
    "nano": {
        "model": "Qwen3-0.6B",
        "prompt_lens": [100, 200],
        "output_lens": [30, 10],
        "runs": [0.5, 0.25, 1.0],
        "shares": {"GEMM": 0.75, "idle": 0.25},
        "profiled": 2.0,
    },
    "single": {
        "model": "Qwen3-0.6B",
        "latency": [{"length": 100, "queue_depth": 1, "seconds": 6e-4}],
        "idle": [
            {
                "batch": 64,
                "seconds": 1e-3,
                "profiled": 2e-3,
                "kernels": 255.0,
                "idle": 0.125,
                "paused": 0.015,
                "shares": {"GEMM": 0.5, "other": 0.1},
            }
        ],
    },
    "models": {
        "rows": [
            {
                "model": "Qwen3-8B",
                "eager": False,
                "batch": 64,
                "length": 300.0,
                "seconds": 8e-3,
            },
            {"model": "Qwen3-32B", "eager": False, "error": "OutOfMemoryError: no"},
        ]
    },
    "peers": {
        "requests": 32,
        "tokens": 1000,
        "absent": {"vllm": "ModuleNotFoundError: No module"},
        "rounds": {"nanovllm": [1.0, 2.0, 1.0], "transformers": [5.0, 6.0], "other": []},
    },
}


def page_of(results: dict[str, Any]) -> str:
    machine = {"GPU": "NVIDIA H200", "date": "2026-01-02", "torch": "2.11"}
    ended = {name: {**part, "ended": "done", "seconds": 9.0} for name, part in results.items()}
    return report.page(machine, "python -m benchmarks.gpu", ended)


def test_page() -> None:
    assert set(RESULTS) == set(report.PARTS)
    page = page_of(json.loads(json.dumps(RESULTS)))
    for line in (
        "# NVIDIA H200, 2026-01-02",
        "| torch | 2.11 |",
        "2 files: 4 passed, 2 failed, 0 errors, 1 skipped.",
        "| tests/b.py | exit status 1 | 1 | 2 | 0 | 0 |",
        "- compute-sanitizer, tests/k.py: exit status 0; ERROR SUMMARY: 0 errors",
        "| copy | 4.00 TB/s |",
        "| triton |  | 256 x 600 | 200.0 | 3.00 | 75% |",
        "| triton | N=128 | OutOfResources: 1 \\| 2 |  |  |  |",
        "| measured | 0.50 | 80 |",
        "| GEMM | 75.0% |",
        "| 100 | 1 | 0.600 | 0.301 | 50% |",
        "| 64 | 1.000 | 2.000 | 255 | 12.5% | 1.5% | GEMM 50%, other 10% |",
        "| Qwen3-8B | yes | 64 x 300 | 8.00 | 4.49 | 8,000 | 56% |",
        "| Qwen3-32B | yes | OutOfMemoryError: no |  |  |  |  |",
        "| transformers | 5.00, 6.00 | 182 | 4.00 |",
        "| other | no round ended | – | – |",
        "- vllm: ModuleNotFoundError: No module",
    ):
        assert line in page.splitlines(), line
    assert "the median is **80 output tokens/s**" in page


@pytest.mark.parametrize("part", [name for name in RESULTS if name != "bandwidth"])
def test_page_of_one_part_without_bandwidth(part: str) -> None:
    page = page_of({part: RESULTS[part]})
    assert report.PARTS[part].title in page


def test_page_of_parts_that_recorded_little() -> None:
    nano = {key: RESULTS["nano"][key] for key in ("model", "prompt_lens", "output_lens")}
    peers = {**RESULTS["peers"], "rounds": {}}
    single = {"model": "Qwen3-8B"}
    page = page_of({"bandwidth": {}, "nano": nano, "single": single, "peers": peers})
    assert "No run ended." in page


def test_a_test_files_counts(tmp_path: Path) -> None:
    test = tmp_path / "test_it.py"
    test.write_text(
        "import pytest\ndef test_a(): pass\ndef test_b(): assert 0, 'why'\n"
        "@pytest.mark.skip\ndef test_c(): pass\n"
    )
    found = tests.run_test_file(str(test), tmp_path, 60)
    assert (found["passed"], found["failed"], found["skipped"]) == (1, 1, 1)
    assert found["ended"] == "exit status 1"
    assert found["failures"][0].startswith("test_b: AssertionError: why")
    assert tests.run_test_file(str(test), tmp_path, 0)["ended"] == "out of time"


def test_swept_options_exist() -> None:
    pytest.importorskip("triton")
    from nanovllm.kernels.triton import decode_attention

    launched = decode_attention._decode_options(torch.bfloat16, 128)
    for options in attention.SWEEP:
        for name, value in options.items():
            now = launched[name] if name in launched else getattr(decode_attention, name)
            assert isinstance(now, int)
            assert now != value, f"{name}={value} is what there is already"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_refused_without_a_gpu(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu", "--out", tmp_path / "out"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert done.stderr == "benchmarks.gpu: there is no CUDA device here\n"
    assert not (tmp_path / "out").exists()
