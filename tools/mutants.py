"""Changes the engine at random, one place at a time, and says which changes no test notices.

    python -m tools.mutants --count 120 --seed 1 [--list]

A mutant is a file with one other comparison, operation, constant or condition, without a statement,
or with a function that returns nothing. Its tests run in a copy of the tree, likely ones first.
"""

import argparse
import ast
import difflib
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tools.check import find_tests

ROOT = Path(__file__).parents[1]
TESTS = {
    "nanovllm/core": ["tests/scheduler", "tests/kv", "tests/test_generation.py"],
    "nanovllm/scheduler": ["tests/scheduler", "tests/engine", "tests/test_generation.py"],
    "nanovllm/kv": ["tests/kv", "tests/scheduler", "tests/tiers", "tests/test_kv_tiers.py"],
    "nanovllm/worker": ["tests/worker", "tests/test_generation.py", "tests/test_invariance.py"],
    "nanovllm/attention": ["tests/attention", "tests/test_invariance.py", "tests/models"],
    "nanovllm/layers/sampl": ["tests/layers", "tests/test_generation.py"],
    "nanovllm/layers/logits_rules": ["tests/layers", "tests/test_logits_processors.py"],
    "nanovllm/apps/server/output_parsers": ["tests/server/output_parsers", "tests/server"],
    "nanovllm/loading": ["tests/loading", "tests/models", "tests/test_real_model.py"],
}
"""By the beginning of a file's path, what is changed: the tests behind those of the file itself."""
PAIRS: tuple[tuple[type, type], ...] = (
    *((ast.Lt, ast.LtE), (ast.Gt, ast.GtE), (ast.Eq, ast.NotEq), (ast.Is, ast.IsNot)),
    *((ast.In, ast.NotIn), (ast.And, ast.Or), (ast.Add, ast.Sub), (ast.Mult, ast.FloorDiv)),
)
SWAPS = {old: new for one, other in PAIRS for old, new in ((one, other), (other, one))}


class Mutant(NamedTuple):
    """A file with one change."""

    path: str
    line: int
    source: str
    difference: str


def change(node: ast.AST) -> tuple[ast.expr | ast.stmt, str] | None:
    """Return the part of `node` that is replaced, and by what; None: nothing is changed here."""
    match node:
        case ast.Compare(left, [op], right) if type(op) in SWAPS:
            return node, f"({ast.unparse(ast.Compare(left, [SWAPS[type(op)]()], right))})"
        case ast.BinOp(left, op, right) if type(op) in SWAPS:
            return node, f"({ast.unparse(ast.BinOp(left, SWAPS[type(op)](), right))})"
        case ast.BoolOp(op, values):
            return node, f"({ast.unparse(ast.BoolOp(SWAPS[type(op)](), values))})"
        case ast.Constant(bool(value)):
            return node, str(not value)
        case ast.Constant(int(value)):
            return node, str(value + 1)
        case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test):
            return test, f"(not ({ast.unparse(test)}))"
        case ast.Return(ast.expr()):
            return node, "return None"
        case ast.Expr(ast.Call()) | ast.AugAssign() | ast.Raise():
            return node, "pass"
        case ast.Assign([ast.Attribute() | ast.Subscript()]):  # of others it is a NameError
            return node, "pass"
    return None


def mutants_of(path: Path) -> Iterator[Mutant]:
    """Yield the mutants of the functions in a file."""
    content = path.read_bytes()
    lines = content.decode().splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line.encode()))
    name = str(path.relative_to(ROOT))
    tree = ast.parse(content)
    functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    nodes = {node for f in functions for statement in f.body for node in ast.walk(statement)}
    found = [change(node) for node in nodes]
    for node, text in sorted(filter(None, found), key=lambda each: (each[0].lineno, each[1])):
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        begin = starts[node.lineno - 1] + node.col_offset
        end = starts[node.end_lineno - 1] + node.end_col_offset
        source = (content[:begin] + text.encode() + content[end:]).decode()
        both = lines, source.splitlines(keepends=True)
        yield Mutant(name, node.lineno, source, "".join(difflib.unified_diff(*both, name, n=1)))


def verdict(mutant: Mutant, copy: Path, seconds: float) -> str:
    """Return "killed" if a test fails with the mutant in the copy, "timeout" if a file's or a
    folder's tests take longer than `seconds`, else "SURVIVED".
    """
    further = next(tests for start, tests in TESTS.items() if mutant.path.startswith(start))
    env = {**os.environ, "PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-qx", "-n", "0", "-p", "no:cacheprovider"]
    target = copy / mutant.path
    original = target.read_text("utf-8")
    target.write_text(mutant.source, "utf-8")
    try:
        for test in dict.fromkeys([*find_tests([mutant.path], copy), *further]):
            done = subprocess.run(
                [*command, test], cwd=copy, env=env, capture_output=True, timeout=seconds
            )
            if done.returncode not in (0, 5):  # 5: there was no test
                return "killed"
        return "SURVIVED"
    except subprocess.TimeoutExpired:
        return "timeout"
    finally:
        target.write_text(original, "utf-8")


def main() -> None:
    """Draw mutants and try them."""
    parser = argparse.ArgumentParser(prog="python -m tools.mutants", description=__doc__)
    parser.add_argument("--count", type=int, default=120)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--timeout", type=float, default=900, help="seconds of a folder's tests")
    parser.add_argument("--list", action="store_true", help="show the mutants and try none")
    args = parser.parse_args()
    files = {file for start in TESTS for file in ROOT.glob(f"{start}*/**/*.py")}
    files |= {file for start in TESTS for file in ROOT.glob(f"{start}*.py")}
    every = [mutant for file in sorted(files) for mutant in mutants_of(file)]
    chosen = random.Random(args.seed).sample(every, args.count)
    found = Counter[str]()
    with tempfile.TemporaryDirectory() as directory:
        copy = Path(directory, "tree")
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".git", ".venv", "__pycache__"))
        for number, mutant in enumerate(chosen, 1):
            status = "listed" if args.list else verdict(mutant, copy, args.timeout)
            found[status] += 1
            sys.stdout.write(f"{number} {status} {mutant.path}:{mutant.line}\n{mutant.difference}")
            sys.stdout.flush()
    sys.stdout.write(f"{dict(found)} of {len(every)} that can be drawn\n")


if __name__ == "__main__":
    main()
