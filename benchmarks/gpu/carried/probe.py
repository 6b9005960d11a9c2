"""Shows what this Python finds in Triton's cache: its launchers, and the key of a small kernel.

Compiles the kernel for Hopper if it is not there. Needs Triton, but no torch; a launcher needs
libcuda.so.1, which may be the stand-in. Prints JSON.
"""

import importlib.util
import json
import os
import sysconfig
import time
from pathlib import Path

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


@triton.jit  # type: ignore[untyped-decorator]
def _probe(x, y, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, SIZE)
    tl.store(y + at, tl.load(x + at) + 1)


def loads(path: Path) -> bool:
    """Return whether a compiled module of Triton can be imported."""
    spec = importlib.util.spec_from_file_location(path.name.partition(".")[0], path)
    assert spec is not None
    assert spec.loader is not None
    try:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
    except ImportError:
        return False
    return True


def main() -> None:
    """Print the findings."""
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    modules = sorted(Path(os.environ["TRITON_CACHE_DIR"]).glob(f"*/*{suffix}"))
    source = ASTSource(_probe, {"x": "*fp32", "y": "*fp32"}, {"SIZE": 128})
    start = time.perf_counter()
    kernel = triton.compile(source, target=GPUTarget("cuda", 90, 32))
    seconds = time.perf_counter() - start
    loaded = sum(map(loads, modules))
    found = {"triton": triton.__version__, "key": kernel.hash, "seconds": seconds}
    print(json.dumps({**found, "modules": len(modules), "loaded": loaded}))


if __name__ == "__main__":
    main()
