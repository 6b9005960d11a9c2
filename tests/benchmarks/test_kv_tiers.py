"""benchmarks/kv_tiers.py on the shipped model."""

from pathlib import Path

import pytest

from benchmarks.kv_tiers import child, directory_bytes, swap
from nanovllm import demo_model


def test_the_second_child_finds_the_prompt(tmp_path: Path) -> None:
    first, second = (child(demo_model.MODEL, "auto", str(tmp_path), [300]) for _ in range(2))
    assert directory_bytes(str(tmp_path)) > 0
    for name in ("token_ids", "logprobs"):
        assert second["found"][0][name] == first["found"][0][name]
    assert first["found"][0]["cached"] == 0
    assert second["found"][0]["cached"] == 256


def test_swapping_prints_a_row(capsys: pytest.CaptureFixture[str]) -> None:
    swap(demo_model.MODEL, "auto", [300], 1)
    assert capsys.readouterr().out.splitlines()[-1].startswith("| 300 | ")
