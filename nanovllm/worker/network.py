"""One network on this rank: its layers, its KV pool and its forward pass over rows.

The target is one, and so is a draft network. Knows no sampling and no schedule.
"""

import dataclasses
from pathlib import Path
from typing import NamedTuple

import torch

from nanovllm.attention.backend import AttentionSpec, Backend
from nanovllm.attention.batch import Batch
from nanovllm.attention.selector import select_backend
from nanovllm.kernels.cpu.library import torch_on_one_thread
from nanovllm.kernels.selector import select_kernels
from nanovllm.layers.attention import Attention
from nanovllm.layers.linear import QKVParallelLinear
from nanovllm.models.model_config import ModelConfig
from nanovllm.options.config import Config
from nanovllm.scheduler.messages import Row
from nanovllm.utils.pages import PageReserve
from nanovllm.utils.transfer import upload
from nanovllm.worker.device_tables import DeviceTables
from nanovllm.worker.kv_cache import PoolMemory, zeroed_pool
from nanovllm.worker.model_loader import build_model, load_model


class NetworkSpec(NamedTuple):
    """A checked checkpoint, which each rank loads."""

    config: Config
    """Options; `config.model` is this checkpoint, also for a draft network."""
    model_config: ModelConfig
    files: list[Path]
    """The weight files; none for dummy weights."""
    reserve: PageReserve | None = None
    """Has memory for the weights already."""


class Network:
    """The layers of a network, loaded, with an attention backend and a KV pool.

    Args:
        max_model_len: number of positions.
    """

    def __init__(self, spec: NetworkSpec, max_model_len: int, device: torch.device) -> None:
        config, model_config, files, reserve = spec
        self.config = config
        self.model_config = model_config
        self.max_model_len = max_model_len
        native = config.native_kernels
        self.kernels = select_kernels(device, model_config.dtype, native=native)
        self.model = build_model(config, model_config, files, max_model_len, device, self.kernels)
        self._kv_dtype = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}.get(
            config.kv_cache_dtype, model_config.dtype
        )
        self.backend = self._select_backend(config, device)
        load_model(self.model, config, model_config, files, self.kernels, reserve)
        self.attentions = [m for m in self.model.modules() if isinstance(m, Attention)]
        self.device = device
        self._pool: torch.Tensor | None = None
        self.memory: PoolMemory | None = None

    @property
    def block_bytes(self) -> int:
        """Bytes of a KV block, all layers of this rank together."""
        return torch.Size(self._pool_shape(1)).numel() * self._kv_dtype.itemsize

    @property
    def num_blocks(self) -> int:
        """Number of blocks of the KV pool."""
        assert self._pool is not None, "make_pool() comes first"
        return self._pool.shape[2]

    def make_pool(self, num_blocks: int) -> None:
        """Bind a new KV pool to the attention layers, in place of any other.

        Its shape is [layers, *`Backend.kv_cache_shape`], for one: [layers, 2 (keys, then values),
        num_blocks, block_size, num_kv_heads, head_dim]. The pool is zeroed: masked keys must be
        finite, as in `Schedule.blocks_to_zero`.
        """
        shape = self._pool_shape(num_blocks)
        by_block = self.device.type == "cpu" and self.backend.blocks_lie_apart
        self._pool = zeroed_pool(shape, self._kv_dtype, self.device, by_block=by_block)
        self.memory = PoolMemory(self._pool) if by_block else None
        for attention, kv_cache in zip(self.attentions, self._pool, strict=True):
            attention.bind(self.backend, kv_cache)

    def free_pool(self) -> None:
        self._pool = self.memory = None
        for attention in self.attentions:
            del attention.kv_cache

    def zero_blocks(self, blocks: list[int], tables: DeviceTables) -> None:
        """Fill `blocks` of the KV pool with 0."""
        pool = self._pool
        assert pool is not None, "make_pool() comes first"
        if blocks and pool.is_cuda:  # one kernel; torch has none for FP8, so fill bytes
            pool.view(torch.uint8).index_fill_(2, upload(blocks, tables.device), 0)
        elif blocks:
            with torch_on_one_thread():
                for block in blocks:
                    pool[:, :, block].zero_()

    def forward(
        self, tables: DeviceTables, rows: list[Row], output_indices: torch.Tensor | None
    ) -> torch.Tensor:
        """Write the KV of all T tokens of `rows`; return hidden states [O, hidden_size].

        Args:
            output_indices: [O], the tokens in the batch whose hidden states are returned, in this
                order. None: all T. Empty: one, of any token.
        """
        hidden: torch.Tensor = self.model(self.batch(tables, rows, output_indices))
        return hidden

    def batch(
        self, tables: DeviceTables, rows: list[Row], output_indices: torch.Tensor | None
    ) -> Batch:
        """Return the batch of `rows` for a call of the model. See `forward`."""
        batch = tables.batch(rows)
        if output_indices is not None and len(output_indices) == 0:
            # Chunks in mid-prompt alone. Kernels must not see an empty batch: keep the first token.
            output_indices = batch.cu_seqlens_q[:1]
        if output_indices is not None and len(output_indices) == len(batch.input_ids):
            output_indices = None
        metadata = self.backend.plan(batch)
        return dataclasses.replace(batch, output_indices=output_indices, metadata=metadata)

    def logits(self, hidden: torch.Tensor, output_indices: torch.Tensor) -> torch.Tensor | None:
        """Return the logits [S, vocab_size] of S tokens of the batch; None except on rank 0.

        Args:
            hidden: of these tokens, or of all tokens of the batch.
            output_indices: [S], the tokens; at least one.
        """
        if len(hidden) != len(output_indices):
            hidden = hidden[output_indices]
        logits: torch.Tensor | None = self.model.compute_logits(hidden)  # type: ignore[operator]
        return logits

    def _select_backend(self, config: Config, device: torch.device) -> Backend:
        qkv = next(m for m in self.model.modules() if isinstance(m, QKVParallelLinear))
        return select_backend(
            AttentionSpec(
                num_heads=qkv.num_heads,
                num_kv_heads=qkv.num_kv_heads,
                head_dim=self.model_config.head_dim,
                dtype=self.model_config.dtype,
                device=device,
                block_size=config.kvcache_block_size,
                kv_dtype=self._kv_dtype,
            ),
            self.kernels,
        )

    def _pool_shape(self, num_blocks: int) -> tuple[int, ...]:
        return (len(self.attentions), *self.backend.kv_cache_shape(num_blocks))
