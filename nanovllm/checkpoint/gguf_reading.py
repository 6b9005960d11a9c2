"""How the tensors of a GGUF file become those of transformers' checkpoints: what llama.cpp's
converter has changed, and reading undoes.

Knows no architecture and no file. Imports no torch.
"""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from nanovllm.checkpoint.gguf_header import GgufTensor


class Order(NamedTuple):
    """An order of a tensor's rows or columns in which the converter has swapped two levels.

    Those from `start` on are [blocks, n, inner, size] in the file and [blocks, inner, n, size] in
    transformers' tensor. n follows from how many there are.
    """

    inner: int
    size: int = 1
    """Neighbours that stay together."""
    blocks: int = 1
    start: int = 0

    def misfit(self, count: int) -> str:
        """Return how many rows or columns there must be; "" if there can be `count` of them."""
        rest = count - self.start
        unit = self.blocks * self.inner * self.size
        fits = rest > 0 and rest % unit == 0
        return "" if fits else f"must have {self.start} and a multiple of {unit}"

    def indices(self, count: int) -> npt.NDArray[np.int64]:
        """Return, for each of `count` rows or columns in transformers' order, its place in the
        file. They must fit.
        """
        moved = np.arange(self.start, count).reshape(self.blocks, -1, self.inner, self.size)
        return np.concatenate([np.arange(self.start), moved.swapaxes(1, 2).ravel()])

    def of_blocks(self, block_size: int) -> "Order | None":
        """Return the order of blocks of `block_size` neighbours; None if it cuts a block."""
        if self.size % block_size or self.start % block_size:
            return None
        return self._replace(size=self.size // block_size, start=self.start // block_size)


def rotary_pairs(num_heads: int) -> Order:
    """Return the order of the rows of q or k in which the two rows of a rotary pair are neighbours:
    llama.cpp's architecture llama, and those like it.
    """
    return Order(inner=2, blocks=num_heads)


class Reading(NamedTuple):
    """What reading does to the numbers of a tensor."""

    rows: Order | None = None
    columns: Order | None = None
    offset: float = 0.0
    """What is added to each number."""
    is_decay: bool = False
    """Whether the file has -exp(x) where transformers has x."""
    axis: int | None = None
    """Where a dimension of 1 is inserted, if the tensor has `axis` + 1 dimensions."""

    def shaped(self, tensor: GgufTensor) -> GgufTensor:
        """Return a tensor with transformers' shape. Its bytes are the same."""
        if self.axis is None or len(tensor.shape) != self.axis + 1:
            return tensor
        return tensor._replace(shape=(*tensor.shape[: self.axis], 1, *tensor.shape[self.axis :]))

    def moves_whole_blocks(self, block_size: int) -> bool:
        """Return whether the blocks of a tensor are transformers' numbers, in another order."""
        changed = self.offset or self.is_decay
        order = self.columns
        return not changed and (order is None or order.of_blocks(block_size) is not None)

    def values(self, stored: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return the numbers of some rows, whose order is right, as transformers has them."""
        if self.columns is not None:
            stored = stored[..., self.columns.indices(stored.shape[-1])]
        if self.is_decay:
            stored = np.log(-stored)
        return stored + np.float32(self.offset) if self.offset else stored


AS_STORED = Reading()
