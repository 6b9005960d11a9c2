"""One network on this rank: its layers, its KV pool and its forward pass over rows.

The target model is one, and so is a draft network.
"""

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn

from nanovllm.attention.backend import Backend
from nanovllm.attention.batch import Batch, Replaced
from nanovllm.core.messages import Row
from nanovllm.options.plugins import at_start
from nanovllm.platform import Platform
from nanovllm.worker.attention_groups import AttentionGroups
from nanovllm.worker.device_tables import DeviceTables
from nanovllm.worker.kv_pool import KVPool
from nanovllm.worker.model_loader import NetworkSpec, build_model, load_model, user_parts

if TYPE_CHECKING:
    from nanovllm.features.lora.rank_adapters import StepAdapters


class Companion(NamedTuple):
    """A network of a feature, whose weights sleep and change with those of the model."""

    model: nn.Module
    make_twin: Callable[[], nn.Module]  # a new one; it has `all_names`, as `Family` has


class Network:
    """The layers of a network, loaded, with an attention backend and a KV pool.

    Attributes:
        adapters: which adapter each token of the running step has; None: the layers have none.
        companions: other networks that the checkpoint has.
        user_parts: names the user's family and weight format, for errors; None: all is ours.
    """

    pool: KVPool  # between `make_pool` and `free_pool`

    def __init__(self, spec: NetworkSpec, max_model_len: int, platform: Platform) -> None:
        self.config = spec.config
        self.model_config = spec.model_config
        self.max_model_len = max_model_len
        self.platform = platform
        device = self.device = platform.device
        native = spec.config.native_kernels
        self.kernels = platform.kernels(spec.model_config.dtype, native=native)
        self.model = build_model(spec, max_model_len, device, self.kernels)
        self.attention = AttentionGroups(self.model, spec, max_model_len, platform, self.kernels)
        self.backend: Backend = self.attention.groups[0].backend
        self.user_parts = user_parts(spec.model_config)
        at_start(self.user_parts, "loading", load_model, self.model, spec, self.kernels)
        self.adapters: StepAdapters | None = None
        self.companions: list[Companion] = []

    @property
    def block_bytes(self) -> int:
        """Bytes of a page of the KV pool: a block of the layers that share it, of this rank."""
        return self.attention.layout.page_bytes

    @property
    def num_blocks(self) -> int:
        return self.pool.num_blocks

    def make_pool(self, num_blocks: int) -> None:
        """Bind a new KV pool to the attention layers, in place of any other."""
        self.pool = self.attention.make_pool(num_blocks)

    def free_pool(self) -> None:
        del self.pool
        self.attention.unbind()

    def forward(
        self,
        tables: DeviceTables,
        rows: list[Row],
        output_indices: torch.Tensor | None,
        *replaced: tuple[Replaced, ...],
    ) -> torch.Tensor:
        """Write the KV of all T tokens of `rows`; return hidden states [O, hidden_size]. The
        arguments are those of `batch`.
        """
        return self.run(self.batch(tables, rows, output_indices, *replaced))

    def run(self, batch: Batch) -> torch.Tensor:
        """Write the KV of the tokens of a planned batch; return what the model returns."""
        if self.adapters is not None:
            self.adapters.begin(batch)
        hidden: torch.Tensor = self.model(batch)
        return hidden

    def batch(
        self,
        tables: DeviceTables,
        rows: list[Row],
        output_indices: torch.Tensor | None,
        embeds: tuple[Replaced, ...] = (),
        rope: tuple[Replaced, ...] = (),
        ends: tuple[Replaced, ...] = (),
    ) -> Batch:
        """Return the batch of `rows` for a call of the model.

        Args:
            output_indices: [O], the tokens in the batch whose hidden states are returned, in this
                order. None: all T. Empty: one, of any token.
            embeds, rope, ends: for `Batch.embeds`, `Batch.rope_positions` and `Batch.ends`.
        """
        batch = tables.batch(rows, rope, ends)
        if output_indices is not None and len(output_indices) == 0:
            # Chunks in mid-prompt alone. Kernels must not see an empty batch: keep the first token.
            output_indices = batch.cu_seqlens_q[:1]
        if output_indices is not None and len(output_indices) == len(batch.input_ids):
            output_indices = None
        batch = dataclasses.replace(batch, output_indices=output_indices, embeds=embeds)
        return self.attention.planned(batch)

    def logits(self, hidden: torch.Tensor, output_indices: torch.Tensor) -> torch.Tensor | None:
        """Return the logits [S, vocab_size] of the S tokens `output_indices`, at least one; None
        except on rank 0. `hidden` is of these tokens, or of all tokens of the batch.
        """
        if len(hidden) != len(output_indices):
            hidden = hidden[output_indices]
        logits: torch.Tensor | None = self.model.compute_logits(hidden)  # type: ignore[operator]
        return logits
