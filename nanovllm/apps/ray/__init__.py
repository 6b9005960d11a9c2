"""Many machines, by Ray. Nothing else in nanovllm imports this folder, nor this folder Ray, before
it is used.
"""

from typing import Any

__all__ = ["app", "deployment"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from nanovllm.apps.ray import serving

    return getattr(serving, name)
