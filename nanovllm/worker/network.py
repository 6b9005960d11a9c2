"""One network on this rank: its layers, its KV pool and its forward pass over rows.

The target is one, and so is a draft network. Knows no sampling and no schedule.
"""

import dataclasses
from pathlib import Path
from typing import Any, NamedTuple

import torch

from nanovllm.attention.backend import AttentionSpec, Backend
from nanovllm.attention.batch import Batch
from nanovllm.attention.selector import select_backend
from nanovllm.kernels.selector import select_kernels
from nanovllm.layers.attention import Attention
from nanovllm.models.model_config import ModelConfig
from nanovllm.options.config import Config
from nanovllm.scheduler.messages import Row
from nanovllm.utils.pages import PageReserve
from nanovllm.worker.device_tables import DeviceTables
from nanovllm.worker.kv_pool import KVPool, page_layout
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


class Group(NamedTuple):
    """Layers that attend alike and have their KV in the same pages."""

    backend: Backend
    table: int
    """The block table that has the ids of these pages."""


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
        self.attentions = [m for m in self.model.modules() if isinstance(m, Attention)]
        self.device = device
        self.backends = self._select_backends(config, device)
        load_model(self.model, config, model_config, files, self.kernels, reserve)
        owners = [layer for layer in self.attentions if layer.source is None]
        self._shapes = [self.backends[self._spec(layer)].kv_cache_shape(1) for layer in owners]
        sizes = [torch.Size(shape).numel() * self._kv_dtype.itemsize for shape in self._shapes]
        self.layout = page_layout(sizes, [self._spec(layer).window for layer in owners])
        self.groups = self._make_groups(owners)
        self.pool: KVPool | None = None

    @property
    def backend(self) -> Backend:
        """The backend of the first layer."""
        return next(iter(self.backends.values()))

    @property
    def block_bytes(self) -> int:
        """Bytes of a page of the KV pool: a block of the layers that share it, of this rank."""
        return self.layout.page_bytes

    @property
    def num_blocks(self) -> int:
        """Number of pages of the KV pool."""
        assert self.pool is not None, "make_pool() comes first"
        return self.pool.num_blocks

    def make_pool(self, num_blocks: int) -> None:
        """Bind a new KV pool to the attention layers, in place of any other."""
        shapes = [(shape[0], num_blocks, *shape[2:]) for shape in self._shapes]
        by_page = self.device.type == "cpu" and self.backend.blocks_lie_apart
        by_page |= len(self.groups) > 1
        self.pool = KVPool(self.layout, shapes, self._kv_dtype, self.device, by_page=by_page)
        caches = iter(self.pool.layers)
        for layer, group in zip(self.attentions, self._group_of, strict=True):
            cache = next(caches) if layer.source is None else layer.source.kv_cache
            layer.bind(self.groups[group].backend, cache, group)

    def free_pool(self) -> None:
        self.pool = None
        for attention in self.attentions:
            del attention.kv_cache

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
        return self.planned(dataclasses.replace(batch, output_indices=output_indices))

    def planned(self, batch: Batch) -> Batch:
        """Return `batch` with the plan of the first group, and with those of others in `others`.

        Args:
            batch: of table 0; its `others` are of the other tables, in their order.
        """
        tables = (batch, *batch.others)
        first, *others = (
            dataclasses.replace(tables[table], metadata=backend.plan(tables[table]), others=())
            for backend, table in self.groups
        )
        return dataclasses.replace(first, others=tuple(others)) if others else first

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

    def _select_backends(
        self, config: Config, device: torch.device
    ) -> dict[AttentionSpec, Backend]:
        """Return a backend for each kind of attention layer, by its spec: of one block size."""
        self._common: dict[str, Any] = {
            "dtype": self.model_config.dtype,
            "device": device,
            "block_size": config.kvcache_block_size,
            "kv_dtype": self._kv_dtype,
        }
        first = select_backend(self._spec(self.attentions[0]), self.kernels)
        self._common["block_size"] = first.block_size
        specs = dict.fromkeys(map(self._spec, self.attentions))
        return {spec: select_backend(spec, self.kernels) for spec in specs}

    def _spec(self, attention: Attention) -> AttentionSpec:
        spec = attention.spec(**self._common)
        if spec.window is not None and spec.window >= self.max_model_len:
            spec = dataclasses.replace(spec, window=None)
        return spec

    def _make_groups(self, owners: list[Attention]) -> list[Group]:
        """Return the groups of layers that share backend and block table; note each layer's."""
        places = dict(zip(owners, self.layout.places, strict=True))
        keys = [
            Group(self.backends[self._spec(layer)], places[layer.source or layer].table)
            for layer in self.attentions
        ]
        groups = sorted(dict.fromkeys(keys), key=lambda group: group.table)
        self._group_of = [groups.index(key) for key in keys]
        return groups
