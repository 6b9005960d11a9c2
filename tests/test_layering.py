"""The architecture, from the source: imports go down, without cycles; functions are short."""

import ast
import functools
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tests.floors import PACKAGE


class Folder(NamedTuple):
    """What the modules of a folder may import beside core, the values and each other."""

    may_import: str
    torch: bool


VALUES = ("errors", "outputs")
NANO_VLLM = (
    *("config", "sampling_params", "engine.block_manager", "engine.model_runner"),
    *("engine.scheduler", "engine.sequence"),
)
"""nano-vllm's modules, for whose imports they stand: each has names of another module."""
FRONT = ("llm", "async_llm", "control_api")
FOLDERS = {
    "features": Folder("", torch=False),
    "apps": Folder("", torch=False),
    "values": Folder("", torch=False),
    "core": Folder("options", torch=False),
    "demo_model": Folder("", torch=False),
    "utils": Folder("", torch=True),
    "attention": Folder("kernels options", torch=True),
    "options": Folder("", torch=False),
    "chat": Folder(
        "loading options utils.limited_process utils.process utils.strict_json", torch=False
    ),
    "loading": Folder("demo_model options utils", torch=True),
    "kernels": Folder("options utils", torch=True),
    "kv": Folder("", torch=False),
    "scheduler": Folder("kv options", torch=False),
    "testing": Folder("kv options scheduler speculation", torch=False),
    "observe": Folder("engine options scheduler worker", torch=True),
    "pooling": Folder("engine loading models options utils worker", torch=True),
    "tiers": Folder("kernels kv layers models options platform scheduler utils worker", torch=True),
    "factory": Folder(
        "loading engine layers.logits_rules parallel kv lora observe options pooling scheduler "
        "speculation structured tiers vision",
        torch=False,
    ),
    "vllm": Folder("factory demo_model engine llm async_llm options", torch=False),
    "nano_vllm": Folder("kv options scheduler worker.model_runner", torch=False),
    "quantization": Folder("loading kernels layers options utils", torch=True),
    "front": Folder("factory chat engine observe options training", torch=False),
    "vision": Folder(
        "attention engine kernels kv layers loading models options scheduler utils worker",
        torch=True,
    ),
    "structured": Folder("loading options platform utils worker", torch=True),
    "lora": Folder(
        "attention loading kernels kv layers models options scheduler utils worker", torch=True
    ),
    "platform": Folder("attention kernels utils", torch=True),
    "models": Folder("attention loading kernels layers options utils", torch=True),
    "layers": Folder("attention loading kernels options utils", torch=True),
    "server": Folder("chat loading engine async_llm options training utils", torch=False),
    "learn": Folder("utils", torch=False),
    "router": Folder("options server utils", torch=False),
    "batch": Folder(
        "async_llm loading.files options server utils.strict_json utils.system", torch=False
    ),
    "cli": Folder(
        "batch chat.pictures demo_model explain lab learn llm options plan prove ray.row_pool "
        "router server utils worker.model_report",
        torch=False,
    ),
    "prove": Folder("llm demo_model kv.groups.state loading options tiers", torch=True),
    "explain": Folder(
        "attention engine kernels layers llm loading options scheduler utils worker", torch=True
    ),
    "lab": Folder(
        "attention kernels kv layers llm loading.shards models options prove scheduler "
        "speculation testing tiers worker",
        torch=True,
    ),
    "plan": Folder("core engine factory kv options scheduler utils", torch=False),
    "__main__": Folder("cli", torch=False),
    "parallel": Folder(
        "attention loading quantization layers lora models options platform pooling "
        "speculation graphs structured tiers training utils vision worker",
        torch=True,
    ),
    "ray": Folder("batch async_llm parallel.ray_cluster options server utils", torch=False),
    "graphs": Folder("attention kernels layers models platform utils worker", torch=True),
    "engine": Folder("chat loading parallel options scheduler", torch=False),
    "speculation": Folder(
        "attention loading kernels kv layers models options graphs utils worker", torch=True
    ),
    "training": Folder(
        "loading engine quantization kernels layers models options utils worker", torch=True
    ),
    "worker": Folder(
        "attention loading quantization kernels kv layers lora models options platform utils",
        torch=True,
    ),
}
SEAMS = {
    "__main__",
    "factory",
    *("parallel.in_process", "parallel.rank_process", "parallel.rank_setup"),
    "control_api",
    *("testing.fake_engine", "testing.random_runs"),
    *("worker.model_loader", "worker.model_report"),
}
"""The modules of the engine that import features, each where an option or a method asks for one."""
MAX_PYTHON_LINES = 60
MAX_C_LINES = 80


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def without_floor(module: str) -> str:
    """Return a module's name as FOLDERS has it: that of a feature or an application alone."""
    return module.removeprefix("features.").removeprefix("apps.")


def folder_of(module: str) -> str:
    if module in NANO_VLLM:
        return "nano_vllm"
    top = without_floor(module).partition(".")[0]
    return "values" if top in VALUES else "front" if top in FRONT else top


class Source(NamedTuple):
    """What a file imports, by names that only type checkers import or not; its classes; and its
    functions, with their numbers of lines.
    """

    imports: set[str]
    types: set[str]
    classes: list[str]
    functions: list[tuple[str, int]]


@functools.cache
def source(path: Path) -> Source:
    found = Source(set(), set(), [], [])
    nodes: list[tuple[ast.AST, bool]] = [(ast.parse(path.read_text(encoding="utf-8")), True)]
    while nodes:
        node, runs = nodes.pop()
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name):
            runs = runs and node.test.id != "TYPE_CHECKING"
        elif isinstance(node, ast.ClassDef):
            found.classes.append(node.name)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            found.functions.append((node.name, node.end_lineno - node.lineno + 1))
        (found.imports if runs else found.types).update(imported(path, node))
        children = ast.iter_child_nodes(node)
        nodes += ((child, runs) for child in children if not isinstance(child, ast.expr))
    return found


def imported(path: Path, node: ast.AST) -> Iterator[str]:
    """Yield the modules that a statement imports; a name that is a module counts as that module."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        assert node.level == 0, f"{path}: relative import"
        for alias in node.names:
            submodule = f"{node.module}.{alias.name}"
            is_module = submodule.removeprefix("nanovllm.") in MODULES
            yield submodule if is_module else node.module or ""


MODULES = {module_name(path): path for path in PACKAGE.rglob("*.py")}


@functools.cache
def imports_of() -> dict[str, set[str]]:
    """Return what each module imports, by module."""
    return {name: source(path).imports for name, path in MODULES.items()}


def test_every_module_is_in_a_folder_with_a_rule() -> None:
    assert {folder_of(name) for name in MODULES if name} == FOLDERS.keys()


def test_imports_go_down() -> None:
    wrong = [
        f"{name} imports {module}"
        for name, found in imports_of().items()
        if name
        for module in sorted(found)
        if not may_import(name, module)
    ]
    assert not wrong


def may_import(name: str, module: str) -> bool:
    """Whether the rule of a module's folder lets it import `module`."""
    rule = FOLDERS[folder_of(name)]
    root, _, inner = module.partition(".")
    if root == "nanovllm" and inner and folder_of(inner) not in ("values", "core", folder_of(name)):
        below = f"{without_floor(inner)}."
        return any(below.startswith(f"{prefix}.") for prefix in rule.may_import.split())
    return rule.torch or root not in ("torch", "safetensors", "triton")


def test_no_import_cycle() -> None:
    """Imports inside functions count too."""
    graph = {
        name: {m.removeprefix("nanovllm.") for m in found if m.startswith("nanovllm.")}
        for name, found in imports_of().items()
        if name  # `nanovllm` itself imports LLM and AsyncLLM only when they are asked for
    }
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, f"import cycle: {' -> '.join([*path, name])}"
        if name not in done:
            for imported in sorted(graph.get(name, ())):
                visit(imported, (*path, name))
            done.add(name)

    for name in graph:
        visit(name, ())


def test_no_two_folders_import_each_other() -> None:
    """What only type checkers import counts, too, but for the types of features and applications,
    which the engine may name.
    """
    graph: dict[str, set[str]] = {}
    for name, path in MODULES.items():
        for module in source(path).imports | source(path).types:
            inner = module.removeprefix("nanovllm.")
            if module != inner and path_of(inner) != path_of(name) and "." not in path_of(inner):
                graph.setdefault(path_of(name), set()).add(path_of(inner))
    assert not [(a, b) for a, found in graph.items() for b in found if a in graph.get(b, ())]


def path_of(module: str) -> str:
    """Return the folder that a module is in: that of a feature or an application, too."""
    floor, *rest = module.split(".")
    return f"{floor}.{rest[0]}" if floor in ("features", "apps") and rest else floor


def test_a_public_class_has_a_name_of_its_own() -> None:
    found: dict[str, list[str]] = {}
    for name, path in MODULES.items():
        for public in (each for each in source(path).classes if not each.startswith("_")):
            found.setdefault(public, []).append(name)
    assert not {name: where for name, where in found.items() if len(where) > 1}


def test_a_file_name_occurs_at_most_twice() -> None:
    """A folder's modules and a feature's may have one name, such as kernels of two devices."""
    names = Counter(path.name for path in MODULES.values() if path.name != "__init__.py")
    assert not [name for name, count in names.items() if count > 2]


SOURCES = sorted([*MODULES.values(), *PACKAGE.rglob("*.c"), *PACKAGE.rglob("*.h")])


def test_functions_are_short() -> None:
    long = []
    for path in SOURCES:
        limit = MAX_PYTHON_LINES if path.suffix == ".py" else MAX_C_LINES
        is_python = path.suffix == ".py"
        for name, count in source(path).functions if is_python else c_functions(path):
            if count > limit:
                long.append(f"{path.relative_to(PACKAGE)}: {name} has {count} of {limit} lines")
    assert not long


def c_functions(path: Path) -> Iterator[tuple[str, int]]:
    """Yield functions, from a line with a "(" that starts at the margin to the "}" there."""
    start = None
    lines = path.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines):
        if line[:1].isalpha() and "(" in line:
            start = number
        elif line.startswith("}") and start is not None:
            yield lines[start], number - start + 1
            start = None


def test_imports_without_torch() -> None:
    code = (
        "import nanovllm.demo_model, nanovllm.loading.hub, nanovllm.scheduler.scheduler, sys; "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=PACKAGE.parent).returncode == 0


def test_the_engine_imports_features_at_its_seams_alone() -> None:
    """Imports inside functions count too."""
    found = {
        name
        for name, modules in imports_of().items()
        if not name.startswith(("features", "apps"))
        and any(module.startswith(("nanovllm.features", "nanovllm.apps")) for module in modules)
    }
    assert found == SEAMS
