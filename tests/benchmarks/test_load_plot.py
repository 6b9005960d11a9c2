"""benchmarks.load_plot draws what `nanovllm bench serve --save-result` saved."""

import json
import subprocess
import sys
import xml.etree.ElementTree
from pathlib import Path

from benchmarks.load_plot import draw
from nanovllm.loadtest.load_plan import LoadPlan
from nanovllm.loadtest.load_report import Client, Measurement, Report

ROOT = Path(__file__).parent.parent.parent
SVG = "{http://www.w3.org/2000/svg}"
PLAN = LoadPlan(model="a <model>", goodput=("ttft:200",))


def report(*measured: Measurement) -> Report:
    return Report(PLAN, measured, 0.5, Client(0.001, 0.2))


def test_texts_are_those_of_the_report(tmp_path: Path) -> None:
    answered = Measurement(0.0, 1.0, [1.1, 1.2, 1.4], 1.5, 10, 3, True)
    failed = Measurement(0.0, 1.0, end=1.2, error="full")
    path = tmp_path / "load.json"
    path.write_text(json.dumps(report(answered, failed).as_json()))
    subprocess.run([sys.executable, "-m", "benchmarks.load_plot", path], cwd=ROOT, check=True)
    drawn = path.with_suffix(".svg").read_text(encoding="utf-8")
    texts = [text.text for text in xml.etree.ElementTree.fromstring(drawn).iter(f"{SVG}text")]
    for text in (
        "a <model> under load",
        "1 requests of 2 completed in 0.5 s; 6 output tokens/s; at most 2 at once",
        "p50 100, p99 100",  # time to first token
        "p50 200, p99 200",  # time per output token
        "p50 150, p99 199",  # between tokens
        "p50 500, p99 500",  # whole request
        "requests at once, up to 1",
    ):
        assert text in texts
    assert drawn.count("stroke-dasharray") == 1, "the limit of goodput"


def test_a_load_without_answers_has_a_picture() -> None:
    result = report(Measurement(0.0, 1.0, end=1.5, error="no")).as_json()
    xml.etree.ElementTree.fromstring(draw(result))
