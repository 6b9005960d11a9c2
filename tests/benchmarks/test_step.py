"""benchmarks.step times the parts of decode steps, prints a table and saves it."""

import re
import sys
from pathlib import Path

import pytest

from benchmarks import step
from benchmarks.step_times import StepTimes
from nanovllm import demo_model
from nanovllm.apps.explain.rates import RateMeter, Rates
from nanovllm.kernels.cpu import library


@pytest.fixture
def times() -> StepTimes:
    return StepTimes(
        command="python -m benchmarks.step",
        date="2026-01-02",
        model="a model",
        dtype="bfloat16",
        quantization=None,
        context=128,
        processor="a processor",
        instruction_sets=["AVX2"],
        num_threads=2,
        torch="2.13",
        bytes_per_second=40e9,
        flop_per_second=400e9,
        weight_bytes=1e9,
        token_flop=1e9,
        milliseconds={
            16: {
                "step": 40.126,
                "products": 30,
                "attention": 5,
                "glue": 2,
                "sampler": 1,
                "Python": 0.5,
            }
        },
    )


def test_limits(times: StepTimes) -> None:
    assert (times.reading_limit, times.arithmetic_limit) == (25, 2.5)


def test_table(times: StepTimes) -> None:
    assert step.table(times).splitlines() == [
        "memory is read at 40.0 GB/s by 2 threads",
        "| batch | step, ms | reading limit | products | attention | glue | sampler | Python |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
        "| 16 | 40.13 | 25.00 | 30.00 | 5.00 | 2.00 | 1.00 | 0.50 |",
    ]


def test_file_has_what_was_saved(times: StepTimes, tmp_path: Path) -> None:
    path = tmp_path / "times.json"
    times.save(path)
    assert StepTimes.load(path) == times


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({"amx_bf16", "avx512_bf16", "avx512f", "avx2"}, ["AMX-BF16", "AVX512-BF16", "AVX-512"]),
        ({"avx512_bf16", "avx512_vnni", "avx512f"}, ["AVX512-BF16", "AVX512-VNNI", "AVX-512"]),
        ({"avx512f", "avx2"}, ["AVX-512"]),
        ({"avx2", "sse2"}, ["AVX2"]),
    ],
)
def test_instruction_sets(flags: set[str], expected: list[str]) -> None:
    assert step.instruction_sets(flags) == expected


@pytest.mark.skipif(library.library() is None, reason="no compiler here")
def test_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rates = iter([(1e9, 3e9), (2e9, 4e9), (1.5e9, 2e9)])

    def measure(self: RateMeter) -> Rates:
        reading, multiplying = next(rates)
        return Rates(reading, {"float32": multiplying})

    monkeypatch.setattr(RateMeter, "measure", measure)
    path = tmp_path / "times.json"
    arguments = ["--model", demo_model.MODEL, "--batch", "1", "3", "--context", "8", "--steps", "2"]
    monkeypatch.setattr(sys, "argv", ["step.py", *arguments, "--json", str(path)])
    call = library.call
    step.main()
    assert library.call is call
    times = StepTimes.load(path)
    assert capsys.readouterr().out == step.table(times) + "\n"
    assert times.command.startswith(f"python -m benchmarks.step --model {demo_model.MODEL} ")
    assert re.fullmatch(r"\d{4}-\d{2}-\d{2}", times.date)
    assert (times.model, times.dtype, times.quantization) == (demo_model.MODEL, "bfloat16", None)
    assert (times.bytes_per_second, times.flop_per_second) == (2e9, 4e9)
    assert times.weight_bytes == times.token_flop > 0
    assert list(times.milliseconds) == [1, 3]
    for parts in times.milliseconds.values():
        assert set(parts) == {"step", *step.COLUMNS, "Python"}
        assert min(parts.values()) > 0
    assert times.context == 8
