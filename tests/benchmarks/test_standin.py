"""The stand-in for CUDA compiles, its memory is real, and it reports what a GPU would refuse."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu.standin import __main__ as standin, build

ROOT = Path(__file__).parent.parent.parent
IMPORTS = ("cudaMalloc", "cudaMadeUp", "cublasZgemm_v2")
BEGIN = """
import sys
from ctypes import CDLL, byref, c_int, c_size_t, c_void_p, cast, create_string_buffer, string_at
cuda = CDLL(sys.argv[1])
size = c_size_t(4096)
host = create_string_buffer(b"x" * 4096)
device, pinned, stream, event, graph = (c_void_p() for _ in range(5))
cuda.cudaMalloc(byref(device), size)
cuda.cudaHostAlloc(byref(pinned), size, 0)
cuda.cudaStreamCreate(byref(stream))
cuda.cudaEventCreate(byref(event))
def launch(*grid_and_block):
    name = create_string_buffer(b"_kernel")
    return cuda.cuLaunchKernel(cast(name, c_void_p), *grid_and_block, 0, stream, None, None)
"""
CAPTURE = """
assert cuda.cudaStreamBeginCapture(stream, {mode}) == 0
{body}
assert cuda.cudaStreamEndCapture(stream, byref(graph)) == 0
"""
GLOBAL, THREAD_LOCAL, RELAXED = range(3)


def headers_of_cuda_13() -> bool:
    try:
        texts = [(path / "cuda.h").read_text() for path in build.header_folders()]
    except build.Unavailable:
        return False
    return "#define CUDA_VERSION 13" in texts[0]


needs_gcc = pytest.mark.skipif(
    not (shutil.which("gcc") and headers_of_cuda_13()), reason="needs gcc and headers of CUDA 13"
)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build.build(tmp_path_factory.mktemp("standin"), IMPORTS)


def seen(library: Path, tmp_path: Path, script: str) -> list[list[str]]:
    """Run a script over the stand-in; return the lines of its log."""
    log = tmp_path / "log"
    environment = {**os.environ, "STANDIN_LOG": str(log)}
    command = [sys.executable, "-c", BEGIN + script, str(library)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return [line.split("\t") for line in log.read_text().splitlines()] if log.exists() else []


@needs_gcc
def test_exports(library: Path) -> None:
    exported = build.symbols("--defined-only", [library])
    assert exported >= {*IMPORTS, "cudaStreamBeginCapture", "cuLaunchKernelEx", "cublasLtMatmul"}


@needs_gcc
def test_memory_and_copies_are_real(library: Path, tmp_path: Path) -> None:
    script = """
cuda.cudaMemcpy(device, host, size, 1)
cuda.cudaMemsetAsync(c_void_p(device.value + 1), 0, c_size_t(4), stream)
cuda.cudaMemcpyAsync(pinned, device, size, 2, stream)
assert string_at(pinned, 6) == b"x\\0\\0\\0\\0x"
cuda.cudaMemset(device, 0, size)
assert string_at(device, 4096) == bytes(4096)
free, total = c_size_t(), c_size_t()
cuda.cudaMemGetInfo(byref(free), byref(total))
assert cuda.cudaMalloc(byref(device), c_size_t(free.value + 1)) == 2  # out of memory
assert cuda.cudaMadeUp() == cuda.cudaMadeUp() == 0
"""
    lines = seen(library, tmp_path, script)
    assert lines == [["skipped", "cudaMadeUp"]]


@needs_gcc
@pytest.mark.parametrize(
    ("mode", "body", "violation"),
    [
        (GLOBAL, "cuda.cudaMemcpyAsync(device, host, size, 1, stream)", "pageable copy"),
        (GLOBAL, "cuda.cudaMemcpyAsync(device, pinned, size, 1, stream)", None),
        (GLOBAL, "cuda.cudaMalloc(byref(device), size)", "allocation"),
        (THREAD_LOCAL, "cuda.cudaHostAlloc(byref(pinned), size, 0)", "allocation"),
        (RELAXED, "cuda.cudaMalloc(byref(device), size)", None),
        (
            GLOBAL,  # as torch allocates for a graph's pool
            "cuda.cudaThreadExchangeStreamCaptureMode(byref(c_int(2)))\n"
            "cuda.cudaMalloc(byref(device), size)",
            None,
        ),
        (THREAD_LOCAL, "cuda.cudaDeviceSynchronize()", "synchronising call"),
        (GLOBAL, "cuda.cudaMemcpy(pinned, device, size, 2)", "synchronising call"),
        (RELAXED, "cuda.cudaStreamSynchronize(stream)", "synchronising call"),
        (GLOBAL, "cuda.cudaEventQuery(event)", "synchronising call"),
    ],
)
def test_what_a_capture_forbids(
    library: Path, tmp_path: Path, mode: int, body: str, violation: str | None
) -> None:
    before = "cuda.cudaDeviceSynchronize()\ncuda.cudaMemcpyAsync(device, host, size, 1, stream)\n"
    lines = seen(library, tmp_path, before + CAPTURE.format(mode=mode, body=body))
    found = [line[1] for line in lines if line[0] == "violation"]
    assert found == ([f"{violation} in a capture"] if violation else [])
    assert ["count", "graphs", "1"] in lines
    assert ["count", "pageable copies outside captures", "1"] in lines


@needs_gcc
def test_a_capture_forbids_nothing_of_another_thread(library: Path, tmp_path: Path) -> None:
    elsewhere = """
import threading
thread = threading.Thread(target=cuda.cudaDeviceSynchronize)
thread.start()
thread.join()"""
    for mode, count in ((THREAD_LOCAL, 0), (GLOBAL, 1)):
        lines = seen(library, tmp_path, CAPTURE.format(mode=mode, body=elsewhere))
        assert sum(line[0] == "violation" for line in lines) == count


@needs_gcc
def test_grids(library: Path, tmp_path: Path) -> None:
    script = """
assert launch(2**31 - 1, 65535, 1, 1024, 1, 1) == 0
assert launch(1, 65536, 1, 128, 1, 1) == 1
assert launch(1, 0, 1, 128, 1, 1) == 1
assert launch(1, 1, 1, 2048, 1, 1) == 1
"""
    lines = seen(
        library, tmp_path, script + CAPTURE.format(mode=0, body="launch(1, 1, 1, 1, 1, 1)")
    )
    refused = [
        line[2] for line in lines if line[:2] == ["violation", "launch beyond CUDA's limits"]
    ]
    assert [text.partition(" block")[0] for text in refused] == [
        "_kernel: grid 1 x 65536 x 1,",
        "_kernel: grid 1 x 0 x 1,",
        "_kernel: grid 1 x 1 x 1,",
    ]
    assert ["count", "kernels without a graph", "1"] in lines
    assert ["count", "kernels in graphs", "1"] in lines


@pytest.mark.skipif(torch.version.cuda is not None, reason="torch is built for CUDA")
def test_refused(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.gpu.standin", "--out", str(tmp_path / "out")]
    for parts, reason in (
        ("nano", "needs a build of torch for CUDA"),
        ("nano,suite,kernels", "tests cannot run over it: suite, kernels"),
    ):
        done = subprocess.run(
            [*command, "--parts", parts], cwd=ROOT, capture_output=True, text=True
        )
        assert done.returncode == 2
        assert reason in done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "part", "verdict"),
    [
        ("nano", {"ended": "done"}, "ran"),
        ("nano", {"ended": "cut after 60 s"}, "cut after 60 s"),
        ("smoke", {"ended": "exit status 1", "control": {"seen": False}}, "ran"),
        ("smoke", {"ended": "exit status 1", "engines": [{"error": "why"}]}, "failed: why"),
        (
            "speculation",
            {"ended": "done", "rows": [{"error": "why"}]},
            "ran; perhaps by chance: why",
        ),
        ("nano", {"ended": "done", "rows": [{"error": "why"}]}, "failed: why"),
        ("step", {"ended": "done", "steps": [{"error": standin.EXPECTED[0]}]}, "ran"),
    ],
)
def test_what_counts_as_ran(name: str, part: dict[str, Any], verdict: str) -> None:
    assert standin.verdict(name, part) == verdict


def test_report() -> None:
    results = {"nano": {"ended": "done", "seconds": 12.4}}
    log = ["count\tgraphs\t3", "count\tgraphs\t4", "skipped\tcudaX"]
    text = "\n".join(standin.report(results, "\n".join(log)))
    assert "| nano | ran | 12 |" in text
    assert "- graphs: 7\n- functions that did nothing: cudaX\n- refused by a GPU: 0" in text
    log += ["violation\tallocation in a capture\tcudaMalloc\tpython -m x"] * 2
    text = "\n".join(standin.report(results, "\n".join(log)))
    assert text.endswith("  - allocation in a capture, 2 times: cudaMalloc (python -m x)")
