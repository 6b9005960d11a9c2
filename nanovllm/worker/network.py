"""One network on this rank: its layers, its KV pool and its forward pass over rows.

The target is one, and so is a draft network. Knows no sampling and no schedule.
"""

import dataclasses
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from nanovllm.attention.backend import AttentionSpec, Backend
from nanovllm.attention.batch import Batch
from nanovllm.attention.selector import select_backend
from nanovllm.formats.quantization import FP8
from nanovllm.kernels.cpu.library import torch_on_one_thread
from nanovllm.layers.attention import Attention
from nanovllm.layers.linear import QKVParallelLinear
from nanovllm.models.model_config import ModelConfig
from nanovllm.options.config import Config
from nanovllm.scheduler.messages import Row
from nanovllm.steps.cuda_capture import can_capture, make_capture
from nanovllm.steps.cuda_graph import ComputeLogits, GraphRunner
from nanovllm.steps.fused_step import faster_logits
from nanovllm.steps.piecewise_graphs import PiecewiseGraphs, piece_sizes, seconds_of
from nanovllm.steps.recorded_step import Forward, RecordedModel, record
from nanovllm.utils.memory import populate
from nanovllm.utils.pages import PageReserve
from nanovllm.worker.device_tables import DeviceTables
from nanovllm.worker.kv_cache import zeros
from nanovllm.worker.model_loader import build_model, load_model

_BYTES_AHEAD = 32 * 2**20
"""Memory that is ready behind the last block in use."""


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
        self.model_config = model_config
        self.max_model_len = max_model_len
        self.model = build_model(config, model_config, files, max_model_len, device)
        self._kv_dtype = {"fp8": FP8, "int8": torch.int8}.get(
            config.kv_cache_dtype, model_config.dtype
        )
        self.backend = self._select_backend(config, device)
        load_model(self.model, config, model_config, files, reserve)
        self.attentions = [m for m in self.model.modules() if isinstance(m, Attention)]
        self.device = device
        self._pool: torch.Tensor | None = None
        self._by_block = device.type == "cpu" and self.backend.blocks_lie_apart
        self._num_populated = 0  # blocks of the pool
        self._records = self.backend.supports_recording and not config.enforce_eager
        self._recorded: RecordedModel | None = None
        self._pieces: PiecewiseGraphs | None = None
        self.uses_graphs = (
            self.backend.supports_graph and not config.enforce_eager and can_capture(device)
        )
        """Whether CUDA graphs run small steps; see `make_graphs`."""

    @property
    def block_bytes(self) -> int:
        """Bytes of a KV block, all layers of this rank together."""
        return torch.Size(self._pool_shape(1)).numel() * self._kv_dtype.itemsize

    def make_pool(self, num_blocks: int) -> None:
        """Bind a new KV pool to the attention layers, in place of any other.

        The pool is zeroed: masked keys must be finite, as in `Schedule.blocks_to_zero`. With graphs
        it has one more block, for the tokens that pad a step: they write and see its first slot
        only.
        """
        self._pool = self._zeroed_pool(num_blocks + self.uses_graphs)
        self._num_populated = 0
        self.populate_beyond(0)
        for attention, kv_cache in zip(self.attentions, self._pool, strict=True):
            attention.bind(self.backend, kv_cache)

    def populate_beyond(self, block: int) -> None:
        """Have memory ready for the blocks behind `block`, which is in use or the first.

        On a CPU the pool takes memory as blocks are used, in their order.
        """
        pool, start = self._pool, self._num_populated
        assert pool is not None, "make_pool() comes first"
        if self._by_block and start < pool.shape[2] and block + 1 >= start:
            self._num_populated = block + 1 + -(-_BYTES_AHEAD // self.block_bytes)
            populate(pool, pool.movedim(2, 0)[start : self._num_populated])

    def free_pool(self) -> None:
        self._pool = None
        for attention in self.attentions:
            del attention.kv_cache

    def zero_blocks(self, blocks: list[int], tables: DeviceTables) -> None:
        """Fill `blocks` of the KV pool with 0."""
        pool = self._pool
        assert pool is not None, "make_pool() comes first"
        if blocks and pool.is_cuda:  # one kernel; torch has none for FP8, so fill bytes
            pool.view(torch.uint8).index_fill_(2, tables.upload(blocks), 0)
        elif blocks:
            with torch_on_one_thread():
                for block in blocks:
                    pool[:, :, block].zero_()

    def record(self, tables: DeviceTables) -> None:
        """Record the forward pass over the pool and `tables`, where the backend supports it."""
        self._recorded = self.recorded(self.model, tables)

    def recorded(self, forward: Forward, tables: DeviceTables) -> RecordedModel | None:
        """Return `forward` recorded over the pool and `tables`; None if that is not possible."""
        return record(forward, tables) if self._records else None

    def make_graphs(
        self,
        tables: DeviceTables,
        max_tokens: int,
        compute_logits: ComputeLogits | None = None,
        **options: Any,
    ) -> GraphRunner:
        """Return a runner for steps of up to `max_tokens` tokens, with no graph captured yet.

        Args:
            compute_logits: None: the model does, or fused kernels where those are faster.
            options: of `GraphRunner`.
        """
        model, pool = self.model, self._pool
        assert pool is not None, "make_pool() comes first"
        if compute_logits is None:

            def unfused(batch: Batch) -> torch.Tensor | None:
                logits: torch.Tensor | None = model.compute_logits(model(batch))  # type: ignore[operator]
                return logits

            compute_logits = faster_logits(
                unfused,
                model,
                self.backend,
                num_blocks=pool.shape[2],
                max_model_len=self.max_model_len,
                max_tokens=max_tokens,
            )
        capture = make_capture(self.device)
        return GraphRunner(compute_logits, self.backend, tables, max_tokens, capture, **options)

    def make_pieces(self) -> PiecewiseGraphs:
        """Return a runner for the forward pass of any rows, with no graph captured yet."""
        assert self._pool is not None, "make_pool() comes first"
        padding_slot = (self._pool.shape[2] - 1) * self.backend.block_size
        capture = make_capture(self.device)
        return PiecewiseGraphs(self.model, capture, padding_slot, self.device)

    def capture_pieces(self, tables: DeviceTables, max_tokens: int, *, progress: bool) -> None:
        """Let graphs run the forward pass of steps of up to `max_tokens` tokens, except for
        attention, where they are faster.
        """
        pieces = self.make_pieces()
        pieces.capture(piece_sizes(max_tokens), progress=progress)

        def make_batch(num_tokens: int) -> Batch:
            whole, rest = divmod(num_tokens, self.max_model_len)
            lengths = [self.max_model_len] * whole + [rest] * (rest > 0)
            rows = [Row(-1, tables.scratch_idx, 0, length, False) for length in lengths]
            return self.batch(tables, rows, None)

        if self.device.type == "cuda":
            pieces.keep_faster(make_batch, partial(seconds_of, device=self.device))
        self._pieces = pieces

    def forward(
        self, tables: DeviceTables, rows: list[Row], wanted: torch.Tensor | None
    ) -> torch.Tensor:
        """Write the KV of all T tokens of `rows`; return their hidden states [T, hidden_size].

        Args:
            wanted: indices of the tokens in the batch whose hidden states are enough; None: all.
                The result may hold just these, in this order, and one of any token if there are
                none.
        """
        if self._recorded is not None and self._recorded.fits(rows):
            return self._recorded.run(rows)
        num_tokens = sum(row.num_scheduled_tokens for row in rows)
        if self._pieces is not None and self._pieces.fits(num_tokens):
            return self._pieces.run(self.batch(tables, rows, None))
        hidden: torch.Tensor = self.model(self.batch(tables, rows, wanted))
        return hidden

    def batch(self, tables: DeviceTables, rows: list[Row], wanted: torch.Tensor | None) -> Batch:
        """Return the batch of `rows` for a call of the model. See `forward`."""
        batch, output_indices = tables.batch(rows), None
        if wanted is not None and len(wanted) < len(batch.input_ids):
            # A chunk in mid-prompt needs no output; keep one token, because kernels must not see
            # an empty batch.
            output_indices = wanted if len(wanted) else batch.cu_seqlens_q[:1]
        metadata = self.backend.plan(batch)
        return dataclasses.replace(batch, output_indices=output_indices, metadata=metadata)

    def logits(self, hidden: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor | None:
        """Return the logits of the tokens `wanted`, from `forward`'s result; None except on rank 0.

        Args:
            wanted: at least one; what `forward` was given.
        """
        # As many hidden states as are wanted: then these are they.
        last = hidden if len(hidden) == len(wanted) else hidden[wanted]
        logits: torch.Tensor | None = self.model.compute_logits(last)  # type: ignore[operator]
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
            native=config.native_kernels,
        )

    def _zeroed_pool(self, num_blocks: int) -> torch.Tensor:
        """Return a new pool [layers, *a layer's shape].

        On a CPU, if the backend allows it, all layers' parts of a block lie side by side, so that
        the first token of a block waits for few new pages.
        """
        shape = self._pool_shape(num_blocks)
        if not self._by_block:
            return zeros(shape, self._kv_dtype, self.device)
        layers, first, blocks, *rest = shape
        return zeros((blocks, layers, first, *rest), self._kv_dtype, self.device).movedim(0, 2)

    def _pool_shape(self, num_blocks: int) -> tuple[int, ...]:
        return (len(self.attentions), *self.backend.kv_cache_shape(num_blocks))


def load_draft(target: Network, draft: NetworkSpec, max_model_len: int) -> Network:
    """Return the network of `draft` beside `target`: on its device, with blocks of its size."""
    block_size = target.backend.block_size
    config = dataclasses.replace(draft.config, kvcache_block_size=block_size)
    network = Network(draft._replace(config=config), max_model_len, target.device)
    assert network.backend.block_size == block_size
    return network
