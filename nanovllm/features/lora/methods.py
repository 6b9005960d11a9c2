"""A layer's weight with adapters: what the layer computes without them, plus each token's own part.

It replaces the layers' `LinearMethod`, so they need no change.
"""

import torch

from nanovllm.attention.batch import Batch
from nanovllm.kernels.adapters import AdapterRows, AdapterTable
from nanovllm.kernels.torch_kernels import Kernels, LinearMethod


class StepAdapters:
    """Which adapter each token of the running step has.

    The last layer of a step may compute some of the tokens only, those of `Batch.output_indices`.
    They are fewer than all, so the number of a layer's inputs tells which of both these are.

    Args:
        max_tokens: of a step.
    """

    def __init__(self, max_tokens: int, num_slots: int, device: torch.device) -> None:
        self.tokens = AdapterRows(max_tokens, num_slots, device)
        self._outputs = AdapterRows(max_tokens, num_slots, device)
        self._num_outputs: int | None = None

    def begin(self, batch: Batch) -> None:
        """Note which tokens the last layer computes. Called before a forward pass.

        Recordings and graphs compute all tokens: they read `tokens` when they run.
        """
        indices = batch.output_indices
        self._num_outputs = None
        if indices is not None:
            self._num_outputs = len(indices)
            self._outputs.take(self.tokens, indices)

    def rows(self, num_inputs: int) -> AdapterRows:
        """Return the adapters of the `num_inputs` tokens that a layer computes."""
        return self._outputs if num_inputs == self._num_outputs else self.tokens


class AdaptedWeight:
    """A weight, and the adapters of its layer. With a bias, that is added before them.

    Args:
        base: the layer's own method.
    """

    def __init__(
        self, base: LinearMethod, table: AdapterTable, step: StepAdapters, kernels: Kernels
    ) -> None:
        self.base = base
        self._table = table
        self._step = step
        self._kernels = kernels

    def apply(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        y = self.base.apply(x, bias)
        self._kernels.add_lora(y, x, self._step.rows(len(x)), self._table)
        return y

    def embedding(self, ids: torch.Tensor) -> torch.Tensor:
        return self.base.embedding(ids)
