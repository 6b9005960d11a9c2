"""The embedding and the language-model head, each rank a slice of the vocabulary (padded to equal
slices).
"""

from collections.abc import Iterator

import torch

from nanovllm.layers.linear import Matrix
from nanovllm.utils.distributed import all_reduce, gather_to_first, tensor_parallel
from nanovllm.utils.loader import Shard


class VocabParallelEmbedding(Matrix):
    """Token embedding; tokens of other ranks' slices come from the sum over ranks."""

    def __init__(self, vocab_size: int, hidden_size: int) -> None:
        slice_size = -(-vocab_size // tensor_parallel().size)
        super().__init__(slice_size, hidden_size)
        self.vocab_size = vocab_size
        self.start = tensor_parallel().rank * slice_size

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        if tensor_parallel().size == 1:
            return self.embedding(input_ids)
        local = input_ids - self.start
        ours = (local >= 0) & (local < self.output_size)
        hidden = self.embedding(local * ours) * ours[:, None]
        return all_reduce(hidden)

    def shards(self, prefix: str) -> Iterator[Shard]:
        assert self.weight is not None
        shape = (self.vocab_size, self.weight.shape[1])
        yield Shard(f"{prefix}.weight", shape, self.weight.data, start=self.start)


class ParallelLMHead(VocabParallelEmbedding):
    """Logits over the whole vocabulary on rank 0, None on the others."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor | None:  # type: ignore[override]
        logits = gather_to_first(self.linear(hidden))
        return None if logits is None else logits[:, : self.vocab_size]
