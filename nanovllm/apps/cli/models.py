"""`nanovllm models`: the supported architectures, or what nanovllm makes of a checkpoint."""

import argparse
import json
import shutil
import sys
import textwrap
from collections.abc import Iterable, Iterator, Set
from typing import Any

from nanovllm.options.flags import Subparsers, add_command
from nanovllm.utils.terminal import write

_MIN_WIDTH = 80
_REFUSED = 1
"""The exit status where the model is not supported."""


def add_models(commands: Subparsers) -> None:
    """Add `models` to the commands."""
    takes = "models takes one MODEL"
    parser = add_command(commands, models, "[MODEL] [--json]", takes, aliases=["show"])
    about = (
        "A checkpoint directory, a GGUF file or a hub id. Reads only its config.json and the "
        "headers of its weights. (default: list the supported architectures)"
    )
    parser.add_argument("model", metavar="MODEL", nargs="?", help=about)
    parser.add_argument("--json", action="store_true", help="Print JSON.")


def models(args: argparse.Namespace) -> int:
    """List the supported architectures, or report what a checkpoint is and needs."""
    from nanovllm.worker import model_report

    if args.model is None:
        rows = model_report.all_supported()
        lines = [(row["architecture"], f"{row['models']}: {row['layers']}") for row in rows]
        _print_result(rows if args.json else _table(lines))
        return 0
    found = model_report.report(args.model)
    _print_result(found if args.json else _table(_report_lines(found)))
    return 0 if found["supported"] else _REFUSED


def _print_result(found: Any) -> None:
    text = found if isinstance(found, str) else json.dumps(found, indent=2)
    write(text + "\n")


def _table(rows: Iterable[tuple[str, str]]) -> str:
    """Return two columns. At a terminal the second one is wrapped."""
    rows = list(rows)
    first = max(len(name) for name, _ in rows) + 2
    width = max(shutil.get_terminal_size().columns, _MIN_WIDTH) - first
    lines = []
    for name, text in rows:
        wrapped = textwrap.wrap(text, width) if sys.stdout.isatty() else [text]
        lines += [f"{name:{first}}{wrapped[0]}", *(" " * first + line for line in wrapped[1:])]
    return "\n".join(lines)


def _report_lines(found: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the rows of a report: what it has, by name, and all layers of a kind in one row."""
    for key, value in found.items():
        name = key.replace("_", " ").removesuffix(" bytes")
        if key == "supported":
            yield name, "yes" if value else f"no: {found['error']}"
        elif key == "memory":
            yield from _report_lines(value)
        elif key.endswith("_bytes") and value:
            yield name, _size(value)
        elif key == "left_out":
            yield name, ", ".join(value) or "nothing"
        elif isinstance(value, list):
            for row in value:
                number = row["num_layers"]
                yield name, f"{number} layer{'s' * (number != 1)}: {_words(row, {'num_layers'})}"
                name = ""
        elif isinstance(value, dict) and value:
            yield name, _words(value)
        elif value and key not in ("model", "error"):
            yield name, "yes" if value is True else str(value)


def _words(row: dict[str, Any], left_out: Set[str] = frozenset()) -> str:
    """Return the fields of a row that say something: a name alone is a field that is true."""
    said = {name.replace("_", " "): row[name] for name in row if row[name] and name not in left_out}
    return ", ".join(
        name if value is True else f"{name} {_text(value)}" for name, value in said.items()
    )


def _text(value: Any) -> str:
    if isinstance(value, list | tuple):
        return " x ".join(map(_text, value))
    return f"{value:.12g}" if isinstance(value, float) else str(value)


def _size(num_bytes: int) -> str:
    """Return bytes in the unit that leaves one to four digits before the point."""
    size = float(num_bytes)
    unit = "bytes"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size /= 1024
        unit = larger
    return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.2f} {unit}"
