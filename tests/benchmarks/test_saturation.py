"""benchmarks/saturation.py on the shipped model: it starts and stops all processes."""

import sys

import pytest

from benchmarks import saturation
from nanovllm import demo_model


@pytest.mark.long  # it starts three processes, each of which imports torch
def test_a_round_has_the_figures_of_both(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["saturation", "--model", demo_model.MODEL, "--rounds", "1", "--num-prompts", "3"]
    lengths = ["--input-len", "9", "--output-len", "5", "--option", "num_kvcache_blocks=64"]
    monkeypatch.setattr(sys, "argv", [*command, *lengths])
    saturation.main()
    title, _, rows = capsys.readouterr().out.partition("| round |")
    assert "3 requests at once, 9\ntokens in, 5 out" in title
    first, median = [line.split(" | ") for line in rows.splitlines()[2:]]
    assert first[1:] == median[1:]
    assert all(float(cell.strip(" |")) > 0 for cell in first[1:])
