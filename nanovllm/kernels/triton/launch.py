"""How kernels are launched: repeatedly without the time that Triton takes to choose one, and before
the previous kernel has ended.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

_CHAIN_CAPABILITY = (9, 0)
"""Minimum compute capability for kernels that begin before the previous one has ended."""


@functools.cache
def can_chain(device: torch.device) -> bool:
    """Return whether a kernel on `device` may begin before the previous one has ended."""
    if device.type != "cuda":
        return False
    return torch.cuda.get_device_capability(device) >= _CHAIN_CAPABILITY


def launch_options(chained: bool) -> dict[str, bool]:
    """Return launch options: whether the kernel may begin before the previous one has ended.

    Before it waits, a chained kernel reads only what no kernel of the chain stores, and stores
    nothing. This is programmatic dependent launch, which needs compute capability 9.0.
    """
    return {"CHAINED": True, "launch_pdl": True} if chained else {"CHAINED": False}


@triton.jit
def let_next_begin(CHAINED: tl.constexpr):
    """Let the next kernel begin, as far as its wait."""
    if CHAINED:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait_for_previous(CHAINED: tl.constexpr):
    """Wait until the previous kernel has ended and its stores are visible.

    Of each kernel of a chain at least one program waits. So when the previous kernel has ended,
    those before it have as well.
    """
    if CHAINED:
        tl.extra.cuda.gdc_wait()


@triton.jit
def join_chain(CHAINED: tl.constexpr):
    """Do both of the above at once: for a kernel that has nothing to load before its wait."""
    let_next_begin(CHAINED)
    wait_for_previous(CHAINED)


class Arguments(NamedTuple):
    """What a launch needs besides the tensors that differ from layer to layer."""

    grid: tuple[int, ...]  # one to three dimensions
    fixed: tuple[Any, ...]  # arguments that follow the tensors
    options: dict[str, Any]  # the kernel's constants, and options of the launch such as num_warps


class Launch:
    """Launches `kernel`, a function with `triton.jit`, in one layer after the other.

    From its arguments Triton finds out which compiled variant of the kernel to launch: from dtypes,
    alignment, constants, and whether numbers are 1 or multiples of 16. That takes the host longer
    than the launch itself. The first call does it, and later ones launch the same variant. So the
    tensors of all calls need the same dtypes, the same alignment and the same strides; None stays
    None.
    """

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._launch: Callable[..., None] | None = None
        self._rest: tuple[Any, ...] = ()

    def __call__(self, *tensors: torch.Tensor | None, arguments: Callable[[], Arguments]) -> None:
        """Launch the kernel.

        Args:
            tensors: its first arguments.
            arguments: returns the others, which are the same in all calls; not called if a kernel
                is to be launched again.
        """
        if self._launch is not None:
            return self._launch(*tensors, *self._rest)
        grid, fixed, options = arguments()
        compiled = self._kernel[grid](*tensors, *fixed, **options)
        if compiled is not None:  # None if it is interpreted
            names = self._kernel.arg_names[len(tensors) + len(fixed) :]
            self._rest = (*fixed, *(options[name] for name in names))
            self._launch = compiled[(*grid, 1, 1)]
        return None
