"""The pictures in docs/pictures are what tools/pictures draws, and show what they claim to show."""

import subprocess
import sys
import xml.etree.ElementTree
from pathlib import Path
from xml.sax.saxutils import escape

import pytest

from benchmarks.step_times import StepTimes
from nanovllm.testing.invariants import check_blocks
from tools.pictures import block_table, roofline, schedule
from tools.pictures.gallery import DIRECTORY, PICTURES, read
from tools.svg import PALETTE, Drawing

ROOT = Path(__file__).parent.parent


def test_each_file_has_a_script() -> None:
    assert {path.name for path in DIRECTORY.glob("*.svg")} == PICTURES.keys()


@pytest.mark.parametrize("name", PICTURES)
def test_file_is_current(name: str) -> None:
    assert PICTURES[name]() == read(name), "run python -m tools.pictures"


@pytest.mark.parametrize("name", PICTURES)
def test_file_is_small_and_well_formed(name: str) -> None:
    text = read(name)
    assert text is not None
    assert len(text.encode()) < 32_000
    tree = xml.etree.ElementTree.fromstring(text)
    assert tree.find("{http://www.w3.org/2000/svg}title") is not None
    assert "prefers-color-scheme:dark" in text


def test_both_modes_have_a_colour_for_everything() -> None:
    drawing = Drawing(10, 10, "a < b", "c")
    drawing.rect(0, 0, 1, 1, "blue", "orange")
    drawing.text(0, 0, "1 < 2")
    text = drawing.svg()
    light, dark = text.split("@media")
    for rule, name in ((".f-blue{fill:", "blue"), (".s-orange{stroke:", "orange")):
        assert f"{rule}{PALETTE[name][0]}}}" in light
        assert f"{rule}{PALETTE[name][1]}}}" in dark
    assert xml.etree.ElementTree.fromstring(text)[-1].text == "1 < 2"


def test_block_table_shows_a_shared_prefix() -> None:
    pool, sequences = block_table.run()
    check_blocks(pool, sequences.values())
    tables = [seq.kv.block_table for seq in sequences.values()]
    assert tables == [[0, 1, 2], [0, 1, 3]]
    assert [block.ref_count for block in pool.blocks] == [2, 2, 1, 1, 0, 0, 0, 0]


def test_schedule_shows_chunks_a_hit_a_preemption_and_its_end() -> None:
    steps = schedule.run(schedule.make_sequences())
    chunks = [step.rows["B"].num_scheduled_tokens for step in steps if "B" in step.rows]
    assert chunks == [2, 7, 4, 1, 1, 1, 1]
    assert [step.hits for step in steps[2::3]] == [{"C": 4}, {"C": 4}]
    assert [step.preempted for step in steps[:4]] == [set(), set(), set(), {"C"}]
    assert (steps[4].waiting, steps[5].resumed) == ({"C"}, {"C"})
    assert [steps[number].finished for number in (4, 6, 7)] == [{"A"}, {"B"}, {"C"}]


def test_roofline_shows_what_was_measured_and_how() -> None:
    times = StepTimes.load(roofline.DATA)
    axes = roofline.Axes(times)
    picture = roofline.draw()
    for text in (times.command, times.date, times.processor, times.model, times.dtype):
        assert escape(text) in picture
    for batch, parts in times.milliseconds.items():
        for part, _, _ in roofline.SERIES:
            x, y = axes.x(batch), axes.y(parts[part] / batch)
            assert roofline.LEFT <= x <= roofline.RIGHT
            assert roofline.TOP <= y <= roofline.BOTTOM
            assert f'cx="{round(x, 1):g}" cy="{round(y, 1):g}"' in picture


def test_check_command() -> None:
    command = [sys.executable, "-m", "tools.pictures", "--check"]
    assert subprocess.run(command, cwd=ROOT).returncode == 0
