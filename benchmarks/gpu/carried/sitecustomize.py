"""Lets Triton find kernels that another machine has compiled. `benchmarks.gpu.carry` puts this
folder on PYTHONPATH, so every process of a run has it.

A key of Triton's cache has the bytes of libtriton.so, and the wheels of one version for different
Pythons differ in nothing else. Here the version stands for them. The sources of Triton's C modules,
which launch kernels, are kept in the cache, so that they can be compiled for another Python.
"""

import hashlib
import importlib.abc
import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


def name_the_version(cache: Any) -> None:
    """Change triton.runtime.cache."""
    cache.triton_key = lambda: f"{sys.modules['triton'].__version__}-carried"


def keep_sources(build: Any) -> None:
    """Change triton.runtime.build."""
    compile_module = build.compile_module_from_src

    def compile_and_keep(src: str, name: str, *args: Any, **options: Any) -> ModuleType:
        module: ModuleType = compile_module(src, name, *args, **options)
        key = hashlib.sha256((src + build.platform_key()).encode()).hexdigest()
        cache = build.get_cache_manager(key)
        if not cache.has_file(f"{name}.c"):
            cache.put(src, f"{name}.c", binary=False)
        return module

    build.compile_module_from_src = compile_and_keep


CHANGES: dict[str, Callable[[Any], None]] = {
    "triton.runtime.cache": name_the_version,
    "triton.runtime.build": keep_sources,
}


class Finder(importlib.abc.MetaPathFinder):
    """Finds a module of CHANGES, once, where others find it; it is changed after its import."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """See importlib."""
        change = CHANGES.pop(fullname, None)
        spec = importlib.util.find_spec(fullname) if change else None
        if change is None or spec is None or spec.loader is None:
            return None
        run = spec.loader.exec_module

        def run_and_change(module: ModuleType) -> None:
            run(module)
            change(module)

        spec.loader.exec_module = run_and_change  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, Finder())
