"""The pictures of the course, course_*.svg, drawn from what the lessons print.

A test compares the outputs on the pages with a run of each lesson, so the pictures show real runs.
"""

import re
from typing import NamedTuple

from nanovllm.apps.learn.course import LESSONS
from tools.svg import Drawing

CELL, LINE, TOP = 26, 34, 84
"""Pixels: the width of a cell, from one row to the next, and the first row's top."""
COLOURS = {"A": "blue", "B": "orange", "C": "green", "D": "blue", "#": "blue"}
"""Colour of a cell by the sequence that has it."""


class Cell(NamedTuple):
    """A square with a text. Without a colour it is empty, and its border is dashed."""

    text: str
    colour: str | None


class Row(NamedTuple):
    """A row of cells, with words at its left and its right."""

    label: str
    cells: list[Cell]
    note: str = ""


class Bar(NamedTuple):
    """A bar, with the number that it shows."""

    text: str
    value: str
    is_chosen: bool


def output(number: int) -> list[str]:
    """Return the lines that a lesson prints."""
    return LESSONS[number - 1].output.splitlines()


def draw_grid(
    title: str, rows: list[Row], legend: str, *, left: int, group: int = 4, width: int = CELL
) -> str:
    """Return a picture of rows of cells.

    Args:
        left: where the cells begin, in pixels.
        width: of a cell.
        group: after so many cells there is a gap: a block ends.
    """
    drawing = Drawing(880, TOP + LINE * len(rows) + 12, title, legend)
    drawing.text(18, 32, title, size=17, bold=True)
    drawing.text(18, 56, legend, "muted", size=12)
    for number, row in enumerate(rows):
        y = TOP + LINE * number
        drawing.text(18, y + 17, row.label, size=12)
        x: float = left - width
        for index, cell in enumerate(row.cells):
            x = left + index * width + index // group * 8
            fill = f"{cell.colour}-pale" if cell.colour else None
            stroke = cell.colour or "line"
            drawing.rect(x, y, width, 24, fill, stroke, radius=3, dashed=not cell.colour)
            middle = x + width / 2
            drawing.text(middle, y + 16, cell.text, size=11, anchor="middle", mono=True)
        drawing.text(x + width + 16, y + 17, row.note, "muted", size=12)
    return drawing.svg()


def draw_bars(title: str, groups: list[tuple[str, list[Bar]]], legend: str, unit: float) -> str:
    """Return a picture of groups of bars.

    Args:
        unit: pixels of a value of 1.
    """
    height = 22
    top = TOP
    total = sum(len(bars) * height + 18 for _, bars in groups)
    drawing = Drawing(880, top + total, title, legend)
    drawing.text(18, 32, title, size=17, bold=True)
    drawing.text(18, 56, legend, "muted", size=12)
    for label, bars in groups:
        drawing.text(18, top + 14, label, size=12)
        for bar in bars:
            drawing.text(340, top + 14, bar.text, size=12, anchor="end", mono=True)
            colour = "orange" if bar.is_chosen else "blue"
            width = float(bar.value) * unit
            drawing.rect(352, top + 2, width, 15, f"{colour}-pale", colour, radius=2)
            drawing.text(360 + width, top + 14, bar.value, "muted", size=12)
            top += height
        top += 18
    return drawing.svg()


def tokens() -> str:
    """Return the picture of lesson 1: the largest logits of each step."""
    groups = []
    for line in output(1):
        if found := re.match(r"after (\d+) tokens, \d+ logits: (.*)", line):
            best = re.findall(r"('.*?'|\".*?\") ([\d.]+)", found[2])
            bars = [Bar(text, value, text == best[0][0]) for text, value in best]
            groups.append((f"after {found[1]} tokens", bars))
    legend = "The largest logits of each step. The largest of all is the next token (orange)."
    return draw_bars("From logits to tokens", groups, legend, unit=16)


def sampling() -> str:
    """Return the picture of lesson 2: the probabilities of the next token."""
    groups = []
    for line in output(2):
        if found := re.match(r"(temperature=.*?): (.*)", line):
            shares = re.findall(r"('.*?'|\".*?\") ([\d.]+)", found[2])
            groups.append((found[1], [Bar(text, share, False) for text, share in shares]))
    legend = "How likely each token is to follow the word 'Chunked'"
    return draw_bars("Temperature and filters", groups, legend, unit=480)


def kv_cache() -> str:
    """Return the picture of lesson 3: the slots that are filled after each step."""
    rows = []
    before = 0
    for line in output(3):
        if found := re.match(r"(step \d+): computes (\d+)  ([#. ]+)  draws (.*)", line):
            slots = found[3].replace(" ", "")
            filled = slots.count("#")
            cells = [
                Cell(str(slot), None if slot >= filled else "orange" if slot >= before else "blue")
                for slot in range(16)
            ]
            rows.append(Row(f"{found[1]} computes {found[2]}", cells, f"draws {found[4]}"))
            before = filled
    legend = "The first 16 slots of the cache after each step. Orange: filled by this step."
    return draw_grid("The KV cache fills up", rows, legend, left=170)


def blocks() -> str:
    """Return the picture of lesson 4: who has which block of the pool."""
    rows = []
    for line in output(4):
        if found := re.match(r"(.*?) +((?:[A-D.] ){7}[A-D.])   tables (.*)", line):
            owners = found[2].split()
            cells = [Cell(owner.strip("."), COLOURS.get(owner)) for owner in owners]
            rows.append(Row(found[1], cells, re.sub("[{}']", "", found[3])))
    legend = "The 8 blocks of the pool after each event, and the block tables"
    return draw_grid("Any free block will do", rows, legend, left=190, group=8)


def prefix_cache() -> str:
    """Return the picture of lesson 5: the tokens of each prompt, and its blocks."""
    lines = output(5)
    rows = []
    for tokens, table in zip(lines[0:8:2], lines[1:8:2], strict=True):
        name = tokens[0]
        blocks = [block.split(", ") for block in re.findall(r"\[([\d, ]+)\]", tokens)]
        found = re.search(r"table (\[.*\]), the first (\d+)", table)
        assert found is not None
        cells = [
            Cell(token, "green" if index < int(found[2]) else "blue")
            for index, block in enumerate(blocks)
            for token in block
        ]
        rows.append(Row(f"prompt {name}", cells, f"blocks {found[1]}"))
    legend = "The tokens of four prompts, in blocks of 4. Green: found in the cache."
    return draw_grid("A common beginning is computed once", rows, legend, left=110)


def batching() -> str:
    """Return the picture of lesson 6: who gets a token in which step."""
    rows = []
    for line in output(6):
        if found := re.match(r"(.*): (\d+) steps", line):
            rows.append(Row(f"{found[1]}: {found[2]} steps", [], ""))
        else:
            name, *marks = line.split()
            colour = COLOURS[name]
            cells = [Cell(name, colour) if mark == "#" else Cell("", None) for mark in marks]
            rows.append(Row("", cells))
    legend = "A column is a step. At most two sequences run at once."
    return draw_grid("Choose anew in each step", rows, legend, left=170, group=99)


def chunked_prefill() -> str:
    """Return the picture of lesson 7: the tokens of each step."""
    rows = []
    for line in output(7):
        if not line.startswith(" "):
            rows.append(Row(line.removesuffix(":"), []))
            continue
        step, _, words = line.strip().partition(":")
        parts = re.findall(r"([AB]) (\d+)(?:-(\d+))?", words)
        cells = [
            Cell(str(position), COLOURS[name])
            for name, first, last in parts
            for position in range(int(first), int(last or first) + 1)
        ]
        rows.append(Row(step, cells, ", ".join(re.findall(r"([AB]) [\d-]+\*", words)) + " draws"))
        if "*" not in words:
            rows[-1] = rows[-1]._replace(note="")
    legend = "The positions that each step computes, of A (blue) and of B (orange)"
    return draw_grid("A long prompt in chunks", rows, legend, left=110, group=99)


def preemption() -> str:
    """Return the picture of lesson 8: the owners of the blocks in each step."""
    rows = []
    for line in output(8):
        if found := re.match(r"step +(\d+): ((?:[AB.] ){5}[AB.]) +(.*)", line):
            owners = found[2].split()
            cells = [Cell(owner.strip("."), COLOURS.get(owner)) for owner in owners]
            rows.append(Row(f"step {found[1]}", cells, re.sub("  +", "   ", found[3])))
    legend = "The 6 blocks of the pool in each step"
    return draw_grid("Two sequences in too few blocks", rows, legend, left=110, group=6)


def speculation() -> str:
    """Return the picture of lesson 9: which guesses were right."""
    rows = []
    for line in output(9):
        if found := re.match(r"(step \d+): guesses '(.*)', (\d) right, then '(.*)'", line):
            num_right = int(found[3])
            cells = [
                Cell(text, "green" if number < num_right else None)
                for number, text in enumerate(found[2].split("|"))
            ]
            rows.append(
                Row(
                    found[1],
                    [*cells, Cell(found[4], "blue")],
                    f"{num_right + 1} token{'s' * bool(num_right)}",
                )
            )
    legend = "Guesses that were right (green), and the model's own next token (blue)"
    return draw_grid("Guess and check", rows, legend, left=110, width=92)


def windows_and_states() -> str:
    """Return the picture of lesson 10: pages in use by the number of tokens."""
    rows = []
    for line in output(10):
        if found := re.match(r" +(\d+ tokens) computed: (\d+) full pages, (\d+) others", line):
            cells = [Cell("", "blue")] * int(found[2]) + [Cell("", "orange")] * int(found[3])
            rows.append(Row(found[1], cells))
        else:
            rows.append(Row(line, []))
    legend = "Pages of the layers with full attention (blue) and of the other layer (orange)"
    return draw_grid("What each kind of layer keeps", rows, legend, left=110, group=99)


def four_bits() -> str:
    """Return the picture of lesson 11: weights, their integers, and what these restore."""
    rows = []
    for line in output(11):
        if found := re.match(r"(weights|integers|restored): +(.*)", line):
            colour = "orange" if found[1] == "integers" else "blue"
            rows.append(Row(found[1], [Cell(text, colour) for text in found[2].split()]))
    legend = "8 weights of a group, the integers that are stored, and integer times scale"
    return draw_grid("Weights in 4 bits", rows, legend, left=110, group=99, width=66)


def ranks() -> str:
    """Return the picture of lesson 12: who has which part of each matrix."""
    parts = [re.findall(r"\[(\d+), (\d+)\]", line) for line in output(12)[:2]]
    rows = []
    for index, (name, side) in enumerate((("gate", 0), ("up", 0), ("down", 1))):
        sizes = [int(part[index][side]) for part in parts]
        cells = [
            Cell(str(rank), COLOURS["AB"[rank]])
            for rank, size in enumerate(sizes)
            for _ in range(size // 32)
        ]
        rows.append(Row(f"{name}: {sum(sizes)} {('rows', 'columns')[side]}", cells))
    legend = "The rank that has each part of the matrices. A cell stands for 32 rows or columns."
    return draw_grid("A layer divided between two ranks", rows, legend, left=170, group=6)


PICTURES = {
    "course_tokens.svg": tokens,
    "course_sampling.svg": sampling,
    "course_kv_cache.svg": kv_cache,
    "course_blocks.svg": blocks,
    "course_prefix_cache.svg": prefix_cache,
    "course_batching.svg": batching,
    "course_chunked_prefill.svg": chunked_prefill,
    "course_preemption.svg": preemption,
    "course_speculation.svg": speculation,
    "course_windows_and_states.svg": windows_and_states,
    "course_four_bits.svg": four_bits,
    "course_ranks.svg": ranks,
}
