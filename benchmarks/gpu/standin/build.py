"""Compiles the stand-in: C files of this folder, and rest.c, which is written here.

rest.c has all functions of the CUDA runtime and of cuBLAS that torch imports and no file defines.
They do nothing and answer success. Imports neither torch nor Triton.
"""

import importlib.util
import re
import subprocess
from collections.abc import Iterable
from pathlib import Path

SOURCES = sorted(Path(__file__).parent.glob("*.c"))
LIBRARY = "libcuda.so.1"
_OF_TRITON = {"cuTensorMapEncodeTiled"}
"""A function of the driver that Triton's launchers need, and no file defines."""
_OF_CUDA = re.compile(r"(__)?cuda[A-Z]|cublas")
_SKIP = """int standin_skip(int *noted, const char *name);
#define SKIP(name) int name(void) { static int noted; return standin_skip(&noted, #name); }
"""
_FLAGS = ("-O1", "-fPIC", "-Wall", "-Werror")


class Unavailable(Exception):
    """The stand-in cannot be built or used here; the message says what is missing."""


def build(folder: Path, imports: Iterable[str]) -> Path:
    """Compile the stand-in in `folder`, and return the path of the library.

    Args:
        imports: the names of all functions that it must have.

    Raises:
        Unavailable: there is no gcc, or no headers of CUDA 13.
    """
    includes = [f"-I{path}" for path in (Path(__file__).parent, *header_folders())]
    objects = []
    for source in SOURCES:
        objects.append(folder / f"{source.stem}.o")
        _run(["gcc", *_FLAGS, *includes, "-c", str(source), "-o", str(objects[-1])])
    missing = sorted((_OF_TRITON | set(imports)) - symbols("--defined-only", objects))
    rest = folder / "rest.c"
    rest.write_text("".join([_SKIP, *map("SKIP({})\n".format, missing)]))
    library = folder / LIBRARY
    linked = [*map(str, objects), str(rest), "-ldl", "-lpthread", "-o", str(library)]
    # Not -Wall: gcc knows other types of some of them.
    _run(["gcc", "-O1", "-fPIC", "-shared", f"-Wl,-soname,{LIBRARY}", *linked])
    return library


def header_folders() -> list[Path]:
    """Return where CUDA's headers are: those of torch's CUDA first, then those of Triton.

    Torch's lack the folder crt, which Triton's have.
    """
    nvidia = importlib.util.find_spec("nvidia")
    places = [Path(path) / "cu13" / "include" for path in _folders(nvidia)]
    triton = importlib.util.find_spec("triton")
    places += [Path(path) / "backends" / "nvidia" / "include" for path in _folders(triton)]
    found = [path for path in places if (path / "cuda_runtime_api.h").exists()]
    if not found:
        raise Unavailable("there are no headers of CUDA: install triton")
    return found


def torch_imports() -> set[str]:
    """Return the functions of CUDA that the libraries of torch import.

    Raises:
        Unavailable: torch is not installed, or it was built without CUDA.
    """
    folders = [Path(path) / "lib" for path in _folders(importlib.util.find_spec("torch"))]
    libraries = [path for folder in folders for path in sorted(folder.glob("lib*.so"))]
    if not any(path.name == "libtorch_cuda.so" for path in libraries):
        raise Unavailable("the stand-in needs a build of torch for CUDA; this one is without")
    return {name for name in symbols("--undefined-only", libraries) if _OF_CUDA.match(name)}


def symbols(which: str, files: Iterable[Path]) -> set[str]:
    """Return the names, without versions, that `nm` lists.

    Args:
        which: --undefined-only or --defined-only.
        files: shared libraries, or objects.
    """
    found = set()
    for file in files:
        dynamic = ["-D"] if ".so" in file.name else []
        printed = _run(["nm", *dynamic, which, str(file)])
        found |= {line.split()[-1].partition("@")[0] for line in printed.splitlines() if line}
    return found


def _folders(spec: object) -> list[str]:
    return list(getattr(spec, "submodule_search_locations", None) or [])


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise Unavailable(f"there is no {command[0]} here") from error
    if done.returncode:
        raise Unavailable(f"{command[0]} failed:\n{done.stderr[:2000]}")
    return done.stdout
