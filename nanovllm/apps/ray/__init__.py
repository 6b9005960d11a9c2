"""Many machines, by Ray. Nothing else in nanovllm imports this folder, nor this folder Ray, before
it is used.

A name is imported when it is first asked for. So a submodule must not have the name of what it
exports, which it would replace here.
"""

import importlib
from typing import Any

_HOMES = {
    "app": "nanovllm.apps.ray.serving",
    "deployment": "nanovllm.apps.ray.serving",
    "generate": "nanovllm.apps.ray.datasets",
}
"""The module of each name."""

__all__ = [*_HOMES]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
