"""How benchmarks.gpu runs parts and test files: options, time limits, batches of attention."""

import argparse
import dataclasses
import json
import os
import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu import __main__ as gpu, attention, report, tests
from benchmarks.gpu.part import Record
from nanovllm.attention.spec import AttentionSpec
from nanovllm.attention.triton import TritonBackend
from tests.kernels.triton.inputs import DEVICE, randn
from tests.kernels.triton.interpreter import patch_interpreter

patch_interpreter()
ROOT = Path(__file__).parent.parent.parent
NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
LIMITS = (420, 330)
"""Seconds of each call of the plan."""


def record(path: Path, seconds: float = 60.0) -> Record:
    return Record(path / "part.json", path, seconds)


def test_options(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OUT", str(tmp_path))
    found = gpu.parse(["--parts", "nano, step"])
    assert found.parts == ["nano", "step"]
    assert found.out == tmp_path
    assert gpu.parse([]).parts == list(report.PARTS)
    monkeypatch.delenv("OUT")
    with pytest.raises(SystemExit):
        gpu.parse(["--parts", "nano"])


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("nano,stepp", "there is no part 'stepp'; the parts are smoke, kernels, bandwidth,"),
        ("nano,step,nano", "part 'nano' is given twice"),
    ],
)
def test_parts_that_are_refused(text: str, error: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=error):
        gpu.names_of_parts(text)


def test_the_plan_of_calls_has_every_part_and_fits() -> None:
    page = (ROOT / "docs" / "benchmarks" / "README.md").read_text(encoding="utf-8")
    calls = [
        gpu.names_of_parts(text) for text in re.findall(r"benchmarks\.gpu --.*--parts (\S+)", page)
    ]
    assert {name for call in calls for name in call} == set(report.PARTS)
    for call, limit in zip(calls, LIMITS, strict=True):
        assert sum(report.PARTS[name].seconds for name in call) <= limit
    limits = dict(re.findall(r"^\| `(\w+)` \| (\d+) \|", page, re.MULTILINE))
    assert limits == {name: f"{part.seconds:g}" for name, part in report.PARTS.items()}


def test_a_command_that_overruns_is_cut_with_its_children(tmp_path: Path) -> None:
    started = tmp_path / "pid"
    script = f"sleep 60 & echo $! >{started}; echo begun; wait"
    log = tmp_path / "log.txt"
    start = time.monotonic()
    assert gpu.run_limited(["sh", "-c", script], log, 1) == "cut after 1 s"
    assert time.monotonic() - start < 10
    assert "begun" in log.read_text()
    child = Path(f"/proc/{int(started.read_text())}/stat")
    # Until init has reaped it, it is a zombie.
    while child.exists() and child.read_text(encoding="utf-8").split()[2] != "Z":
        assert time.monotonic() - start < 10, "the child runs on"
        time.sleep(0.01)


@NO_GPU
def test_a_call_writes_what_it_has(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    call: dict[str, Any] = {"machine": {"GPU": "none"}, "command": "a command", "results": {}}
    gpu.run_parts(call, ["bandwidth"], tmp_path, time.monotonic() + 60)
    gpu.run_parts(call, ["nano"], tmp_path, time.monotonic() + 1)
    results = json.loads((tmp_path / "results.json").read_text())["results"]
    assert results["bandwidth"]["ended"] == "exit status 2"  # there is no GPU
    assert results["nano"]["ended"] == "not begun: the call's time was over"
    assert gpu.failed(results)
    assert "there is no CUDA device here" in (tmp_path / "log.txt").read_text()
    page = (tmp_path / "page.md").read_text()
    assert "| nano | not begun: the call's time was over | 0 | 60 |" in page
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "log.txt",
        "page.md",
        "results.json",
    ]
    assert "bandwidth: exit status 2" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("results", "failed"),
    [
        ({"nano": {"ended": "cut after 70 s"}}, True),
        ({"suite": {"ended": "done", "files": {"a": {"ended": "passed"}}}}, False),
        ({"suite": {"ended": "done", "files": {"a": {"ended": "out of time"}}}}, True),
    ],
)
def test_what_counts_as_failed(results: dict[str, Any], failed: bool) -> None:
    assert gpu.failed(results) is failed


def test_a_part_notes_what_failed_and_what_it_has_no_time_for(tmp_path: Path) -> None:
    part = record(tmp_path, 5.0)
    assert part.has_time(1, "a")
    assert not part.has_time(10, "b")
    part.attempt("rows", {"case": 1}, lambda: {"seconds": 0.5})
    part.attempt("rows", {"case": 2}, lambda: {"seconds": 1 / 0})
    assert json.loads((tmp_path / "part.json").read_text()) == {
        "left_out": ["b"],
        "rows": [
            {"case": 1, "seconds": 0.5},
            {"case": 2, "error": "ZeroDivisionError: division by zero"},
        ],
    }


def test_files_that_run_and_files_that_cannot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A package named `tests` is installed, and one that a file imports is not."""
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "__init__.py").touch()
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{ROOT}")
    broken = tmp_path / "test_broken.py"
    broken.write_text("import no_such_package\n")
    test = tmp_path / "test_it.py"
    test.write_text(
        "import pytest\nfrom tests.glossary import QUESTIONS\n"
        "def test_a(): assert QUESTIONS\n"
        "def test_b(): assert 0, 'why'\n"
        "@pytest.mark.skip\ndef test_c(): pass\n"
        "def test_d(no_such_fixture): pass\n"
    )
    tests.run_files(record(tmp_path), [str(broken), str(test)])
    files = json.loads((tmp_path / "part.json").read_text())["files"]
    (lost,) = (file for name, file in files.items() if name.endswith("test_broken.py"))
    assert (lost["ended"], lost["errors"]) == ("failed", 1)
    (found,) = (file for name, file in files.items() if name.endswith("test_it.py"))
    assert found["ended"] == "failed"
    assert [found[count] for count in tests.COUNTS] == [1, 1, 1, 1]
    assert found["failures"][0].startswith("test_b: AssertionError: why")
    assert "no_such_fixture" in found["failures"][1]


def test_every_test_file_has_a_part() -> None:
    kernels = tests.kernel_files()
    assert "tests/kernels/triton/test_ops.py" in kernels
    assert "tests/kernels/triton/test_compile.py" not in kernels
    assert "tests/attention/test_gpu_backends.py" in kernels
    files = tests.test_files("**/test_*.py")
    assert set(kernels) < set(files)
    file, test = tests.ALONE.split("::")
    assert file in kernels
    assert f"def {test}(" in (ROOT / file).read_text()
    for name in files:  # what only a GPU can run
        assert name in kernels or not tests.ONLY_CUDA.search((ROOT / name).read_text())


@NO_GPU
@pytest.mark.parametrize("sizes", [(2, 1, 70), (2, 3, 70), (2, 1, 70, 64)])
def test_batches_of_attention_are_what_a_backend_takes(sizes: tuple[int, ...]) -> None:
    case = attention.Case(*sizes)
    spec = AttentionSpec(4, 2, 32, torch.float16, DEVICE, None)
    backend: Any = TritonBackend(spec)
    batch, num_blocks = attention.make_batch(backend, case)
    assert num_blocks == 4
    blocks = batch.block_tables[:, :2].flatten().tolist()
    assert set(blocks) <= {0, 1, 2, 3}
    assert len(set(blocks)) == 4 - case.shared // 64
    cache = randn(*backend.kv_cache_shape(num_blocks), dtype=torch.float16)
    q = randn(case.rows * case.tokens, 4, 32, dtype=torch.float16, seed=1)
    out = backend.attend(q, cache, dataclasses.replace(batch, metadata=backend.plan(batch)))
    keys, values = (
        part[batch.block_tables[0, :2].long()].flatten(0, 1)[: case.length, 0].double()
        for part in cache
    )
    weights = (keys @ q[case.tokens - 1, 0].double() / 32**0.5).softmax(0)
    assert (out[case.tokens - 1, 0].double() - weights @ values).abs().max() < 2e-3
