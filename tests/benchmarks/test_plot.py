"""benchmarks.plot draws the rows that benchmarks.versus saved."""

import subprocess
import sys
import xml.etree.ElementTree
from pathlib import Path

import pytest

from benchmarks.comparison import Comparison, Row
from benchmarks.plot import draw

ROOT = Path(__file__).parent.parent.parent
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def comparison() -> Comparison:
    return Comparison(
        command="python -m benchmarks.versus nanovllm vllm=PYTHON",
        date="2026-01-02",
        processor="a processor, 2 cores",
        model="a <model> & its weights",
        startup={"nanovllm": 10.0, "vllm": 150.0},
        cases={"decode1": "1 sequence, 32 tokens in, 64 out", "nano": "32 sequences; drawn"},
        rows=[
            Row("decode1", "nanovllm", 2.0, 1.0, [2.0]),
            Row("decode1", "vllm", 4.02, 2.01, [4.02]),
            Row("nano", "nanovllm", 20.0, 1.0, [20.0]),
            Row("nano", "vllm", 10.0, 0.5, [10.0]),
        ],
    )


def test_texts_and_bars(comparison: Comparison) -> None:
    tree = xml.etree.ElementTree.fromstring(draw(comparison))
    texts = [element.text for element in tree.iter(f"{SVG}text")]
    for text in ("decode1", "1 sequence, 32 tokens in, 64 out", "drawn", "2.01×", "4.02 s",
                 "0.500×", "15.0×", "150 s", "a processor, 2 cores; a <model> & its weights",
                 "2026-01-02: python -m benchmarks.versus nanovllm vllm=PYTHON"):  # fmt: skip
        assert text in texts
    bars = [float(bar.get("width", 0)) for bar in tree.iter(f"{SVG}rect") if bar.get("x") == "300"]
    legend, bars = bars[0], bars[1:]
    one = bars[0]
    assert legend == 11
    # The ratio 15 of the start is cut at the longest bar of a case, 2.01.
    expected = [1, 2.01, 1, 0.5, 1, 2.01]
    assert bars == pytest.approx([one * ratio for ratio in expected], abs=0.2)


def test_command(comparison: Comparison, tmp_path: Path) -> None:
    path = tmp_path / "comparison.json"
    comparison.save(path)
    assert Comparison.load(path) == comparison
    command = [sys.executable, "-m", "benchmarks.plot", path]
    subprocess.run([*command, "-o", tmp_path / "chart.svg"], cwd=ROOT, check=True)
    assert (tmp_path / "chart.svg").read_text(encoding="utf-8") == draw(comparison)
    subprocess.run(command, cwd=ROOT, check=True)
    assert path.with_suffix(".svg").exists()
