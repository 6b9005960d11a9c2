"""What one plain run touches: the files and lines that a short generate of the shipped model runs.

    python -m tools.trace [--files]

It prints one figure a line and, with --files, each file with how many of its lines ran in the start
and in `generate`. tests/test_trace.py holds the figures to limits. A file counts if the body of a
function or class in it ran: what runs when a module is imported does not count.
"""

import argparse
import ast
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "nanovllm"

Executed = dict[str, set[int]]
"""The line numbers that ran, by file; paths are relative to the package."""


class Run(NamedTuple):
    """What a plain run executed and imported."""

    start: Executed
    """By `LLM(...)`."""
    generate: Executed
    """By `generate`, after the start."""
    modules: list[str]
    """Files of the modules that were imported."""

    @property
    def both(self) -> Executed:
        """By start and `generate`."""
        names = self.start.keys() | self.generate.keys()
        return {
            name: self.start.get(name, set()) | self.generate.get(name, set()) for name in names
        }


def plain_run() -> Run:
    """Trace one greedy generate of the shipped model on the default CPU path, in a new process."""
    code = "from tools.trace import trace_here; trace_here()"
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    found = json.loads(done.stdout.splitlines()[-1])
    start, generate = (
        {name: set(lines) for name, lines in found[phase].items()}
        for phase in ("start", "generate")
    )
    return Run(start, generate, found["modules"])


def trace_here() -> None:
    """Do what `plain_run` says in this process, and print it as JSON."""
    import nanovllm

    executed: dict[str, Executed] = {"start": {}, "generate": {}}
    root = f"{PACKAGE}{os.sep}"

    phase = "start"  # the engine's thread, which the start makes, is traced in both

    def note(frame: FrameType, event: str, _: Any) -> Any:
        name = frame.f_code.co_filename
        if not name.startswith(root) or frame.f_code.co_name == "<module>":
            return None
        lines = executed[phase].setdefault(name.removeprefix(root), set())
        lines.add(frame.f_lineno)
        return note

    def run(now: str, function: Callable[[], Any]) -> Any:
        nonlocal phase
        phase = now
        threading.settrace(note)
        sys.settrace(note)
        try:
            return function()
        finally:
            sys.settrace(None)
            threading.settrace(None)

    from nanovllm import LLM, SamplingParams, demo_model

    options: dict[str, Any] = {"device": "cpu", "max_model_len": 256}
    params: dict[str, Any] = {"temperature": 0, "max_tokens": 8}
    llm = run("start", lambda: LLM(demo_model.MODEL, **options))
    run(
        "generate",
        lambda: llm.generate("A KV cache is", SamplingParams(**params), use_tqdm=False),
    )
    files = {getattr(module, "__file__", None) for module in [*sys.modules.values()]}
    modules = sorted(str(f).removeprefix(root) for f in files if f and f.startswith(root))
    assert nanovllm.__file__ == f"{root}__init__.py", nanovllm.__file__
    found = {phase: {n: sorted(lines) for n, lines in e.items()} for phase, e in executed.items()}
    sys.stdout.write(json.dumps({**found, "modules": modules}) + "\n")


def num_lines(names: "set[str] | list[str]") -> int:
    """Return how many lines the files of the package have that `names` names."""
    return sum(len((PACKAGE / name).read_text().splitlines()) for name in set(names))


def figures(run: Run) -> dict[str, float]:
    """Return the figures of a run, and of how the package is written, by name."""
    found: dict[str, float] = {}
    for name, executed in (("generate", run.generate), ("start", run.both)):
        found[f"{name}_files"] = len(executed)
        found[f"{name}_lines"] = num_lines({*executed})
        found[f"{name}_executed"] = sum(map(len, executed.values()))
    found["imported_files"] = len(run.modules)
    found["imported_lines"] = num_lines(run.modules)
    return found | written()


def written() -> dict[str, float]:
    """Return the figures of how the package is written, by name.

    packed_per_1000: assignments of several values to several names, such as `a, b = x, y`, in 1,000
        lines. classes_made: calls `type(name, bases, fields)`. free_outside: files that reach into
        another object's `_free`.
    """
    files = lines = packed = made = outside = 0
    for path in PACKAGE.rglob("*.py"):
        text = path.read_text()
        files += 1
        lines += text.count("\n")
        nodes = [*ast.walk(ast.parse(text))]
        packed += sum(map(_is_packed, nodes))
        made += sum(_makes_class(node) for node in nodes)
        outside += any(_reaches_free(node) for node in nodes)
    return {
        "package_files": files,
        "package_lines": lines,
        "packed_per_1000": round(1000 * packed / lines, 2),
        "classes_made": made,
        "free_outside": outside,
    }


def _is_packed(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Tuple)
        and any(isinstance(target, ast.Tuple) for target in node.targets)
    )


def _makes_class(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "type"
        and len(node.args) == 3
    )


def _reaches_free(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Attribute)
        and node.attr == "_free"
        and not (isinstance(node.value, ast.Name) and node.value.id == "self")
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--files", action="store_true", help="list the files, too")
    args = parser.parse_args()
    run = plain_run()
    if args.files:
        sys.stdout.write(f"{'file':44}{'lines':>6}{'start':>7}{'generate':>10}\n")
        for name in sorted(run.both, key=lambda name: (name not in run.generate, name)):
            start, generate = (len(e.get(name, ())) for e in (run.start, run.generate))
            sys.stdout.write(f"{name:44}{num_lines([name]):6}{start:7}{generate:10}\n")
    for name, value in figures(run).items():
        sys.stdout.write(f"{name:20} {value:,}\n")


if __name__ == "__main__":
    main()
