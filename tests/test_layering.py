"""Imports only go down: the tiers of the architecture, read from the source."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "nanovllm"

T0 = ("errors", "validation", "config", "sampling_params", "outputs")
T1 = tuple(f"engine.{m}" for m in ("sequence", "schedule", "block_manager", "scheduler"))
T2 = ("utils", "kernels", "attention", "layers", "models")
T3 = tuple(
    f"engine.{m}"
    for m in (
        *("batch", "kv_cache", "sampling", "step_output", "cpu_graph", "cuda_graph"),
        *("model_runner", "worker"),
    )
)
T4 = tuple(f"engine.{m}" for m in ("executor", "detokenizer", "output_processor", "llm_engine"))
T5 = ("llm", "async_llm", "cli")

# module prefix -> the prefixes it may import from nanovllm, and whether it may import torch
RULES = {
    **dict.fromkeys(T0, (T0, False)),
    **dict.fromkeys(T1, (T0 + T1, False)),
    "utils": ((*T0, "utils"), True),
    "kernels": ((*T0, "utils", "kernels"), True),
    "attention": ((*T0, "utils", "kernels", "attention"), True),
    "layers": ((*T0, "utils", "kernels", "attention", "layers"), True),
    "models": (T0 + T2, True),
    **dict.fromkeys(T3, ((*T0, *T2, "engine.schedule", *T3), True)),
    "engine.executor": ((*T0, *T1, *T3, "utils.hub"), True),
    "engine.detokenizer": (T0, False),
    "engine.output_processor": ((*T0, *T1, "engine.detokenizer", "utils.hub"), False),
    "engine.llm_engine": ((*T0, *T1, *T4, "utils.hub"), False),
    **dict.fromkeys(T5, ((*T0, *T4, "llm", "glossary"), False)),
}


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def within(module: str, prefixes: tuple[str, ...]) -> bool:
    return any(module == p or module.startswith(p + ".") for p in prefixes)


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found.add(node.module or "")
    return found


MODULES = {module_name(p): p for p in PACKAGE.rglob("*.py")}
RULED = {name: path for name, path in MODULES.items() if within(name, tuple(RULES))}


def test_every_module_has_a_tier() -> None:
    packages = {"", "engine"}
    apart = {name for name in MODULES if within(name, ("glossary",))}
    assert MODULES.keys() - RULED.keys() - apart == packages


@pytest.mark.parametrize("name", RULED)
def test_imports_go_down(name: str) -> None:
    allowed, torch_allowed = next(rule for prefix, rule in RULES.items() if within(name, (prefix,)))
    for module in imports(RULED[name]):
        if module.startswith("nanovllm."):
            assert within(module.removeprefix("nanovllm."), allowed), f"{name} imports {module}"
        if module.split(".")[0] in ("torch", "safetensors", "triton"):
            assert torch_allowed, f"{name} imports {module}"


@pytest.mark.parametrize(
    "module", ["nanovllm", "nanovllm.glossary", "nanovllm.engine.scheduler", "nanovllm.utils.hub"]
)
def test_imports_without_torch(module: str) -> None:
    code = f"import {module}, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=PACKAGE.parent).returncode == 0
