"""The token embedding and the language-model head, split over the ranks by vocabulary.

The vocabulary is padded so that all ranks have slices of equal size.
"""

from collections.abc import Iterator

import torch

from nanovllm.layers.linear import WeightModule
from nanovllm.loading.shards import Shard
from nanovllm.utils.distributed import all_reduce, gather_to_first, tensor_parallel


class VocabParallelEmbedding(WeightModule):
    """Token embedding. Each rank looks up the tokens of its slice; all_reduce adds the results."""

    is_gathered = True

    def __init__(self, vocab_size: int, hidden_size: int) -> None:
        slice_size = -(-vocab_size // tensor_parallel().size)
        super().__init__(slice_size, hidden_size)
        self.vocab_size = vocab_size
        self.start = tensor_parallel().rank * slice_size

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        if tensor_parallel().size == 1:
            return self.embedding(input_ids)
        local_ids = input_ids - self.start
        is_local = (local_ids >= 0) & (local_ids < self.output_size)
        hidden = self.embedding(local_ids * is_local) * is_local[:, None]
        return all_reduce(hidden)

    def shards(self, prefix: str) -> Iterator[Shard]:
        """Yield this rank's rows of the weight."""
        assert self.weight is not None
        shape = (self.vocab_size, self.weight.shape[1])
        weight = Shard(f"{prefix}.weight", shape, self.weight.data, start=self.start)
        yield from self.weight_shards(weight)


class ParallelLMHead(VocabParallelEmbedding):
    """The language-model head."""

    is_gathered = False

    def forward(self, hidden: torch.Tensor) -> torch.Tensor | None:  # type: ignore[override]
        """Return logits over the whole vocabulary on rank 0, None on the other ranks."""
        logits = gather_to_first(self.linear(hidden))
        return None if logits is None else logits[:, : self.vocab_size]
