"""Draws docs/pictures/beside_*.svg from the tables and raw data of docs/: python -m tools.plots."""

import html
import json
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

DOCS = Path(__file__).parents[1] / "docs"
CLASSES = ("ink", "paper", "c0", "c1", "c2", "c3")
"""Of what is drawn; c0 to c3 are the series."""
LIGHT = ("#1f2328", "#fff", "#0072b2", "#c45500", "#00805c", "#59636e")
DARK = ("#e6edf3", "#0d1117", "#56b4e9", "#f0a53a", "#3ecfa0", "#9aa4af")
FONT = "text{font:14px ui-sans-serif,system-ui,-apple-system,'Segoe UI',Arial,sans-serif}"
RAW = {
    "beside_vllm": (
        "vLLM's time over ours, bfloat16",
        {
            "Zen 5": "zen5/qwen3-0.6b-vllm",
            "Zen 4": "zen4/qwen3-0.6b-vllm",
            "Xeon with AMX": "amx/qwen3-0.6b-vllm",
        },
    ),
    "beside_llamacpp": (
        "llama.cpp's time over ours, Q4_0 (Zen 5)",
        {
            "Qwen3 0.6B": "zen5/qwen3-0.6b-q4_0-llamacpp",
            "Qwen3 4B": "zen5/qwen3-4b-q4_0-llamacpp",
        },
    ),
    "beside_models": (
        "Other models (Zen 5), bfloat16",
        {
            "Llama 3.2 1B, vLLM": "zen5/llama-3.2-1b-vllm",
            "Granite 4 H-Tiny (12 layers), vLLM": "zen5/granite-4-h-tiny-12l-vllm",
            "GLM-4.7-Flash (5 layers), vLLM": "zen5/glm-4.7-flash-5l-vllm",
            "LFM3 1.7B, transformers": "zen5/lfm3-1.7b-transformers",
        },
    ),
}
"""By the picture's name: its title, and the file of raw data of each series."""
WIDTH, LEFT, RIGHT, BAR = 480, 16, 78, 18  # narrow: a telephone shows text that can be read


class Bar(NamedTuple):
    """One figure: its row, its series, its length and what stands behind it."""

    row: str
    series: str
    value: float
    text: str


def raw_ratios(names: dict[str, str]) -> Iterator[Bar]:
    """Yield the peer's time over ours in each case of files, given by the names of their series."""
    for series, name in names.items():
        data = json.loads((DOCS / f"benchmarks/{name}.json").read_text("utf-8"))
        for row in data["rows"]:
            if row["engine"] != "nanovllm":
                yield Bar(data["cases"][row["case"]], series, row["ratio"], f"{row['ratio']:.2f}")


def openvino_ratios() -> Iterator[Bar]:
    """Yield the figures in brackets of OpenVINO's rows in docs/performance.md."""
    cases = ("1 sequence, 32 in, 64 out", "16 sequences, 128 in, 48 out", "8 prompts of 512")
    page = (DOCS / "performance.md").read_text("utf-8")
    for engine, ratios in re.findall(r"^\|[^|]*\| (OpenVINO, \w+) \|(.+)\|$", page, re.MULTILINE):
        for case, ratio in zip(cases, re.findall(r"\(([\d.]+)\)", ratios), strict=True):
            yield Bar(case, engine, float(ratio), ratio)


def differing_answers() -> Iterator[Bar]:
    """Yield how many answers of each engine differ from the same request alone."""
    for name in ("nanovllm", "vllm", "transformers", "llamacpp"):
        data = json.loads((DOCS / f"benchmarks/exactness/{name}.json").read_text("utf-8"))
        engine = re.split(r" \(|,", data["engine"])[0]
        for each in data["verdicts"]:
            count, total = each["num_different"], each["num_answers"]
            yield Bar(each["way"], engine, count / total, f"{count} of {total}")


def draw(title: str, bars: list[Bar], line: float) -> str:
    """Return the SVG of bars, grouped by row; `line` is the value where two engines are as fast."""
    series = list(dict.fromkeys(bar.series for bar in bars))
    scale = (WIDTH - LEFT - RIGHT) / max(bar.value for bar in bars)
    parts = [text(LEFT, 28, title, "ink head")]
    y = 54
    for number, name in enumerate(series):
        parts += [box(LEFT, y, 12, f"c{number}"), text(LEFT + 20, y + 12, name)]
        y += BAR + 2
    for row in dict.fromkeys(bar.row for bar in bars):
        y += 6
        for words in textwrap.wrap(row, 62):
            y += BAR
            parts.append(text(LEFT, y, words))
        y += 6
        top = y
        for bar in bars:
            if bar.row == row:
                length = max(bar.value * scale, 3)  # 0 shows its colour too
                parts.append(box(LEFT, y, length, f"c{series.index(bar.series)}"))
                parts.append(text(LEFT + length + 6, y + 12, bar.text))
                y += BAR
        parts.append(f'<path class="line" d="M{LEFT + line * scale:.1f} {top - 3}V{y - 1}"/>')
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y + 14}" role="img"'
    return "\n".join(
        [
            f'{head} width="{WIDTH}" height="{y + 14}">',
            f"<title>{html.escape(title)}</title>",
            f"<style>{FONT}.head{{font-weight:600}}{colours(LIGHT)}",
            f"@media (prefers-color-scheme:dark){{{colours(DARK)}}}</style>",
            '<rect class="paper" width="100%" height="100%" rx="8"/>',
            *parts,
            "</svg>\n",
        ]
    )


def colours(chosen: tuple[str, ...]) -> str:
    """Return the rules of CSS for the classes."""
    fills = (f".{name}{{fill:{each}}}" for name, each in zip(CLASSES, chosen, strict=True))
    return f"{''.join(fills)}.line{{stroke:{chosen[0]};stroke-dasharray:4 3}}"


def text(x: float, y: float, words: str, kind: str = "ink") -> str:
    """Return words that begin at x on the line y."""
    return f'<text class="{kind}" x="{x:.1f}" y="{y}">{html.escape(words)}</text>'


def box(x: float, y: float, width: float, kind: str) -> str:
    """Return a bar, or the mark of a series."""
    return f'<rect class="{kind}" x="{x}" y="{y}" width="{width:.1f}" height="14"/>'


def pictures() -> dict[str, str]:
    """Return the SVG of each picture by its name."""
    return {
        "beside_openvino": draw("OpenVINO's time over ours (Xeon)", list(openvino_ratios()), 1),
        "beside_exactness": draw("Answers that differ from alone", list(differing_answers()), 0),
    } | {name: draw(title, list(raw_ratios(files)), 1) for name, (title, files) in RAW.items()}


if __name__ == "__main__":
    for name, picture in pictures().items():
        (DOCS / f"pictures/{name}.svg").write_text(picture, "utf-8")
