"""The layers of a network that have a state, and where in a sequence's pages each keeps its parts.

From its admission to its end, a sequence has the same number of pages for the states of all layers.
The parts are placed first-fit, in the order of the layers.
"""

import logging
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import nn

from nanovllm.kernels.states import StatePart, States, aligned
from nanovllm.layers.state_layer import StateLayer

logger = logging.getLogger(__name__)


class PartPlace(NamedTuple):
    """Where a part of a state is."""

    column: int  # which of the sequence's pages it is in
    offset: int  # bytes from the start of the page


def pack_parts(parts: Iterable[StatePart], page_bytes: int) -> tuple[list[PartPlace], int]:
    """Return the place of each of `parts`, and the number of pages that they take.

    A part lies in the first page that has room for it.

    Args:
        page_bytes: at least the size of the largest part, aligned.
    """
    places = []
    used = list[int]()
    first = 0
    for part in parts:
        size = aligned(part.nbytes)
        assert size <= page_bytes
        column = next((i for i in range(first, len(used)) if used[i] + size <= page_bytes), -1)
        if column < 0:
            column = len(used)
            used.append(0)
        places.append(PartPlace(column, used[column]))
        used[column] += size
        while first < len(used) and used[first] == page_bytes:
            first += 1
    return places, len(used)


class StateLayers:
    """The layers with state of `model`. `lay_out` comes first, then `bind`.

    Attributes:
        largest_part: bytes that a page must have at least; 0: no layer has a state.
        num_pages: pages that the state of one sequence takes.
    """

    def __init__(self, model: nn.Module) -> None:
        self.layers = [module for module in model.modules() if isinstance(module, StateLayer)]
        self._parts = [part for layer in self.layers for part in layer.parts]
        self.largest_part = max((aligned(part.nbytes) for part in self._parts), default=0)
        self.num_pages = 0
        self._places: list[PartPlace] = []

    @property
    def num_bytes(self) -> int:
        """Bytes of the parts of one sequence's state."""
        return sum(part.nbytes for part in self._parts)

    @property
    def layout(self) -> list[tuple[StatePart, PartPlace]]:
        """Each part of a state, and its place. `lay_out` comes first."""
        return list(zip(self._parts, self._places, strict=True))

    def lay_out(self, page_bytes: int) -> None:
        """Find the place of each part in pages of `page_bytes`."""
        self._places, self.num_pages = pack_parts(self._parts, page_bytes)
        if self.layers:
            logger.info("state: %d bytes a sequence, in %d pages", self.num_bytes, self.num_pages)

    def bind(self, pool: torch.Tensor) -> None:
        """Give each layer its parts in `pool`, [num_pages, page_bytes] uint8."""
        start = 0
        for layer in self.layers:
            end = start + len(layer.parts)
            places = torch.tensor(self._places[start:end], device=pool.device)
            layer.bind(States(pool, places, layer.parts))
            start = end

    def unbind(self) -> None:
        """Let go of the pool."""
        for layer in self.layers:
            del layer.states
