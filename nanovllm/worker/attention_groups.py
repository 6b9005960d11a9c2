"""The groups of a network's attention layers: layers that attend alike and share block tables.

A model whose layers are all alike has one.
"""

import dataclasses
from typing import Any, NamedTuple

import torch
from torch import nn

from nanovllm.attention.backend import Backend
from nanovllm.attention.batch import Batch
from nanovllm.attention.selector import select_backend, user_backend
from nanovllm.attention.spec import AttentionSpec
from nanovllm.errors import ConfigError
from nanovllm.kernels.torch_kernels import Kernels
from nanovllm.layers.attention import Attention
from nanovllm.options.plugins import is_plugin
from nanovllm.platform import Platform
from nanovllm.worker.kv_pool import KVPool, page_layout
from nanovllm.worker.model_loader import NetworkSpec
from nanovllm.worker.state_layers import StateLayers


class AttentionGroup(NamedTuple):
    """Layers that attend alike and have their KV in the same pages."""

    backend: Backend
    table: int  # the block table that has the ids of these pages


class AttentionGroups:
    """Chooses a backend for each kind of layer, and where in a page each has its KV.

    Args:
        max_model_len: a window that is as long is none.
    """

    def __init__(
        self,
        model: nn.Module,
        spec: NetworkSpec,
        max_model_len: int,
        platform: Platform,
        kernels: Kernels,
    ) -> None:
        self._platform = platform
        config = spec.config
        model_config = spec.model_config
        one_table = spec.one_table
        self.layers = layers = [m for m in model.modules() if isinstance(m, Attention)]
        kv_dtypes = {"fp8": torch.float8_e4m3fn, "int8": torch.int8, "int4": torch.uint8}
        self._dtype = kv_dtypes.get(config.kv_cache_dtype, model_config.dtype)
        common: dict[str, Any] = {
            "dtype": model_config.dtype,
            "device": platform.device,
            "block_size": config.kvcache_block_size,
            "kv_dtype": self._dtype,
        }
        asked = config.attention_backend

        def select(spec: AttentionSpec) -> Backend:
            if is_plugin(asked):
                return user_backend(spec, asked)
            return select_backend(spec, platform.attention_backends(kernels))

        first = select(_spec(layers[0], max_model_len, spec, common))
        common["block_size"] = first.block_size
        specs = [_spec(layer, max_model_len, spec, common) for layer in layers]
        backends = {spec: select(spec) for spec in dict.fromkeys(specs)}
        spec_of = dict(zip(layers, specs, strict=True))
        self.causal = all(spec.causal for spec in specs)
        self.picture_tokens = max(_picture_tokens(spec, layer) for layer in layers)
        # Of a step: its last prompt, or picture, is whole, too, if tokens see those after them.
        self.max_extra_tokens = max(0, (self.picture_tokens if self.causal else max_model_len) - 1)
        owners = [layer for layer in layers if layer.source is None]
        self._shapes = [backends[spec_of[layer]].kv_cache_shape(1) for layer in owners]
        sizes = [torch.Size(shape).numel() * self._dtype.itemsize for shape in self._shapes]
        windows = [None if one_table else spec_of[layer].window for layer in owners]
        self.states = StateLayers(model)
        self.layout = page_layout(sizes, windows, self.states.largest_part)
        self.states.lay_out(self.layout.page_bytes)
        if self.states.layers and one_table:
            raise ConfigError(
                "speculative_config: the draft model has layers that keep a state of the sequence, "
                "which only the target may have"
            )
        places = dict(zip(owners, self.layout.places, strict=True))
        keys = [
            AttentionGroup(backends[spec], places[layer.source or layer].table)
            for layer, spec in spec_of.items()
        ]
        self.groups = sorted(dict.fromkeys(keys), key=lambda group: group.table)
        self._spread = len(self.groups) > 1 or self.states.num_pages > 0
        spread = self._spread or (config.has_tiers and platform.in_host_memory)
        if is_plugin(asked) and spread:
            _check_apart(self.backends, asked)
        self._group_of = [self.groups.index(key) for key in keys]

    @property
    def backends(self) -> list[Backend]:
        return [group.backend for group in self.groups]

    @property
    def reads_past_rows(self) -> bool:
        """Whether a slot may be read that no token has filled, even without drafts."""
        return self.states.num_pages > 0 or not all(b.masks_loads for b in self.backends)

    def make_pool(self, num_blocks: int) -> KVPool:
        """Return a new KV pool of `num_blocks` pages, bound to the layers."""
        shapes = [(shape[0], num_blocks, *shape[2:]) for shape in self._shapes]
        # A CPU's first token of a block then waits for few new pages. Fused kernels of a GPU want
        # contiguous layers.
        by_page = all(b.blocks_lie_apart and not b.supports_graph for b in self.backends)
        by_page |= self._spread
        pool = KVPool(self.layout, shapes, self._dtype, self._platform, by_page=by_page)
        caches = iter(pool.layers)
        for layer, group in zip(self.layers, self._group_of, strict=True):
            cache = next(caches) if layer.source is None else layer.source.kv_cache
            layer.bind(self.groups[group].backend, cache, group)
        if self.states.layers:
            self.states.bind(pool.pages)
        return pool

    def unbind(self) -> None:
        """Let the layers go of the pool."""
        for layer in self.layers:
            del layer.kv_cache
        self.states.unbind()

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


def _check_apart(backends: list[Backend], asked: str) -> None:
    """Raise ConfigError if a backend of the user's, which the option attention_backend names,
    cannot take a cache whose blocks lie apart.
    """
    for backend in backends:
        if not backend.blocks_lie_apart:
            raise ConfigError(
                f'attention_backend="{asked}" says that blocks_lie_apart is False, but they '
                "do in a model with several kinds of layers, and on a CPU with kv_offload_gib, "
                "kv_cache_dir or kv_store: let it index blocks and offsets, or leave one out"
            )


def _picture_tokens(spec: NetworkSpec, layer: Attention) -> int:
    """Return how many tokens of a picture see each other in `layer`, at most; 0: none do."""
    if spec.vision is None:
        return 0
    options = spec.config.mm_processor_kwargs or {}
    return spec.vision.tokens_that_see_each_other(options, has_window=bool(layer.options.window))


def _spec(
    layer: Attention, max_model_len: int, network: NetworkSpec, common: dict[str, Any]
) -> AttentionSpec:
    """Return what `layer` needs of a backend. A window as long as `max_model_len` is none."""
    num_heads, num_kv_heads, head_dim = layer.sizes
    spec = AttentionSpec(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        **{**vars(layer.options), **common, "sees_pictures": _picture_tokens(network, layer) > 0},
    )
    whole = spec.window is not None and spec.window >= max_model_len
    return dataclasses.replace(spec, window=None) if whole else spec
