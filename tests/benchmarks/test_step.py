"""benchmarks.step times the parts of decode steps, and prints a table."""

import sys

import pytest

from benchmarks import step
from benchmarks.rates import RateMeter, Rates
from nanovllm import demo_model
from nanovllm.kernels.cpu import library


@pytest.mark.skipif(library.library() is None, reason="no compiler here")
def test_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    rates = iter([(1e9, 3e9), (2e9, 4e9), (1.5e9, 2e9)])

    def measure(self: RateMeter) -> Rates:
        reading, multiplying = next(rates)
        return Rates(reading, {"float32": multiplying})

    monkeypatch.setattr(RateMeter, "measure", measure)
    arguments = ["--model", demo_model.MODEL, "--batch", "1", "3", "--context", "8", "--steps", "2"]
    monkeypatch.setattr(sys, "argv", ["step.py", *arguments])
    call = library.call
    step.main()
    assert library.call is call
    head, _, heading, _, *rows = capsys.readouterr().out.splitlines()
    assert "memory is read at 2.0 GB/s" in head
    assert heading == (
        "| batch | step, ms | reading limit | products | attention | glue | sampler | Python |"
    )
    assert [row.split(" | ")[0] for row in rows] == ["| 1", "| 3"]
    for row in rows:
        assert all(float(cell) > 0 for cell in row.strip("| ").split(" | "))
