"""Small steps of a dense decoder with fused kernels: five launches a layer.

Decides which models have such steps, and at which sizes they are faster on this GPU, as timed at
start.
"""

import dataclasses
import functools
import logging

import torch
from torch import nn

from nanovllm.attention.backend import Backend
from nanovllm.attention.batch import Batch
from nanovllm.attention.spec import PLAIN, AttentionSpec
from nanovllm.attention.triton import PagedBackend
from nanovllm.features.graphs.cuda_capture import CUDACapture, Graph
from nanovllm.features.graphs.cuda_graph import ComputeLogits
from nanovllm.kernels.torch_math import NORM_ROUNDED
from nanovllm.layers.activation import ActAndMul
from nanovllm.layers.attention import Attention
from nanovllm.layers.embed_head import ParallelLMHead, VocabParallelEmbedding
from nanovllm.layers.layernorm import LayerNorm, Norm, RMSNorm
from nanovllm.layers.linear import WeightModule
from nanovllm.layers.rotary_embedding import RotaryEmbedding
from nanovllm.models.decoder import (
    Decoder,
    DecoderForCausalLM,
    DecoderLayer,
    GatedMLP,
    SelfAttention,
)
from nanovllm.platform.cuda import CUDA
from nanovllm.utils.distributed import tensor_parallel
from nanovllm.worker.timing import measure_seconds

logger = logging.getLogger(__name__)

SIZES = (1, 2, 4)
"""Rows for which both ways are timed, up to those for which the layers are faster. A step is
computed as one of the next larger size is."""
_LONG = 4096  # tokens of the sequences in the longer of the two batches that are timed
_TOLERANCE = 0.1
"""How far a logit may be off in these batches, relative to the largest. Rounding takes a percent or
two in bfloat16; the check is for kernels that compute something else."""

_Sums = tuple[torch.Tensor | None, torch.Tensor | None]
"""A linear's output as the parts of a sum, and its bias."""


def unsupported(model: nn.Module, backend: Backend) -> str | None:
    """Return why the fused kernels cannot compute steps of `model`, or None if they can."""
    spec = backend.spec
    if spec.device.type != "cuda":
        return "needs a CUDA GPU"
    return unsupported_model(model, backend)


def unsupported_model(model: nn.Module, backend: Backend) -> str | None:
    """Return the same, on any device."""
    spec = backend.spec
    if not isinstance(model, DecoderForCausalLM):
        return f"{type(model).__name__} is no dense decoder"
    if tensor_parallel().size > 1:
        return f"tensor_parallel_size is {tensor_parallel().size}"
    if not isinstance(backend, PagedBackend):
        return f"the attention backend {backend.name} has another KV cache"
    if spec.quantized_kv:
        return "the KV cache has 8 bits"
    if spec.head_dim % 16 or spec.head_dim > 256:
        return f"head_dim {spec.head_dim} is no multiple of 16 up to 256"
    if spec.dtype == torch.float32:
        return "in float32 they are slower"
    if (reason := _not_plain(model, spec)) is not None:
        return reason
    for module in model.modules():
        if isinstance(module, WeightModule) and _weight(module, spec.dtype) is None:
            return "the weights are quantised, or have adapters"
        if isinstance(module, DecoderLayer) and module.store_input is not None:
            return "a draft head reads hidden states"
    return None


def _not_plain(model: DecoderForCausalLM, spec: AttentionSpec) -> str | None:
    """Return which part of `model` is another than that of decoder.py, or None."""
    for module in model.modules():
        for part in (Decoder, DecoderLayer, SelfAttention, VocabParallelEmbedding):
            if isinstance(module, part) and type(module) not in (part, ParallelLMHead):
                return f"{type(module).__name__} is no plain {part.__name__}"
        if isinstance(module, DecoderLayer):
            for own, plain in ((module.self_attn, SelfAttention), (module.mlp, GatedMLP)):
                if type(own) is not plain:
                    return f"{type(own).__name__} is no plain {plain.__name__}"
        if isinstance(module, Attention) and module.options != PLAIN:
            return f"attention has options: {module.options}"
        if isinstance(module, ActAndMul) and module.activation != "silu":
            return f"the activation is {module.activation}"
        if isinstance(module, LayerNorm) or (
            isinstance(module, RMSNorm) and (module.kind != NORM_ROUNDED or module.multiplier != 1)
        ):
            return "a norm is of another kind"
        if isinstance(module, RotaryEmbedding) and (
            module.interleaved
            or module.q_scale is not None
            or module.cos_sin.shape[1] != spec.head_dim
        ):
            return "heads rotate in another way"
    if type(model).compute_logits is not DecoderForCausalLM.compute_logits:
        return f"{type(model).__name__} changes the logits"
    return None


class FusedStep:
    """Computes logits of steps of up to SIZES[-1] rows of one token.

    Args:
        model: `unsupported_model` is None for it.
        backend: owns the layout of the KV cache, which the attention layers are bound to.
    """

    def __init__(self, model: DecoderForCausalLM, backend: Backend) -> None:
        from nanovllm.kernels.triton import fused_attention, fused_layer, launch

        self._attention = fused_attention
        self._layer = fused_layer
        self._model = model
        spec = self._spec = backend.spec
        shape = (fused_layer.MAX_ROWS, spec.num_kv_heads)
        self._splits_done = torch.zeros(shape, dtype=torch.int32, device=spec.device)
        self._chained = launch.can_chain(spec.device)

    def compute_logits(self, batch: Batch) -> torch.Tensor:
        """Write the KV of R rows of one token; return logits [R, vocab_size]."""
        decoder = self._model.model
        head = self._model.lm_head
        residual = decoder.embed_tokens(batch.input_ids)
        sums: _Sums = (None, None)
        for layer in decoder.layers:
            assert isinstance(layer, DecoderLayer)
            sums, residual = self._run_layer(layer, sums, residual, batch)
        norm = decoder.norm
        logits, _ = self._norm_linear(residual, sums, norm, head, None)
        return logits[:, : head.vocab_size]

    def _run_layer(
        self, layer: DecoderLayer, sums: _Sums, residual: torch.Tensor, batch: Batch
    ) -> tuple[_Sums, torch.Tensor]:
        """Run five kernels; return the MLP's output, not yet added up, and the residual.

        Args:
            sums: the previous layer's output.
        """
        attention = layer.self_attn
        mlp = layer.mlp
        assert isinstance(attention, SelfAttention)
        linear = attention.qkv_proj
        qkv, residual = self._norm_linear(
            residual, sums, layer.input_layernorm, linear, linear.bias
        )
        assert isinstance(mlp, GatedMLP)
        heads = self._attention.attend_rows(
            qkv,
            *attention.qk_norm_rope()[:4],  # the weights, eps and angles
            batch.positions,
            batch.angle_rows,
            batch.slot_mapping,
            batch.block_tables,
            attention.attn.kv_cache,
            self._spec.num_heads,
            self._splits_done,
            chained=self._chained,
        )
        sums = self._partials(heads.flatten(1), attention.o_proj), attention.o_proj.bias
        norm = layer.post_attention_layernorm
        gate_up = mlp.gate_up_proj
        product, residual = self._norm_linear(
            residual, sums, norm, gate_up, gate_up.bias, gated=True
        )
        return (self._partials(product, mlp.down_proj), mlp.down_proj.bias), residual

    def _norm_linear(
        self,
        residual: torch.Tensor,
        sums: _Sums,
        norm: Norm,
        linear: WeightModule,
        bias: torch.Tensor | None,
        *,
        gated: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `fused_layer.norm_linear`."""
        weight = _weight(linear, self._spec.dtype)
        assert weight is not None
        return self._layer.norm_linear(
            residual, *sums, norm.weight, norm.eps, weight, bias,
            gated=gated, chained=self._chained,
        )  # fmt: skip

    def _partials(self, x: torch.Tensor, linear: WeightModule) -> torch.Tensor:
        """See `fused_layer.linear_partials`."""
        weight = _weight(linear, self._spec.dtype)
        assert weight is not None
        return self._layer.linear_partials(x, weight, chained=self._chained)


def _weight(matrix: WeightModule, dtype: torch.dtype) -> torch.Tensor | None:
    """Return the weight of a matrix; None if the fused kernels cannot multiply with it."""
    weight = matrix.weight
    return (
        weight if weight is not None and matrix.method is None and weight.dtype == dtype else None
    )


def faster_logits(
    unfused: ComputeLogits,
    model: nn.Module,
    backend: Backend,
    *,
    num_blocks: int,
    max_model_len: int,
    max_tokens: int,
) -> ComputeLogits:
    """Return what computes a step's logits: `unfused`, or fused kernels where they are faster.

    Both are timed in graphs. That writes to blocks of the KV pool, which must not have owners yet.
    Sizes for which the pool is too small are not fused.

    Args:
        unfused: computes logits with the layers of `model`.
        num_blocks: of the KV pool, which the attention layers are bound to.
        max_model_len: number of positions.
        max_tokens: of a step.
    """
    reason = unsupported(model, backend)
    if reason is not None:
        logger.info("the kernels of small steps are not fused: %s", reason)
        return unfused
    assert isinstance(model, DecoderForCausalLM)
    fused = FusedStep(model, backend).compute_logits
    device = backend.spec.device
    lengths = (1, min(max_model_len, _LONG))
    sizes = SIZES[: 1 + sum(size < max_tokens for size in SIZES)]
    chosen = []
    try:
        for size in sizes:
            if 2 * size >= num_blocks:
                break
            batch = make_batch(size, num_blocks, backend.block_size, lengths[1], device)
            if not _is_faster(fused, unfused, backend, batch, lengths):
                break
            chosen.append(size)
    except Exception as error:  # the compilers and the driver raise many types
        logger.warning("fused kernels are off: %s: %s", type(error).__name__, error)
        chosen = []
    shown = ", ".join(map(str, chosen)) or "none"
    logger.info("fused kernels compute steps of these numbers of tokens: %s", shown)
    return functools.partial(_compute_logits, fused, unfused, chosen)


def _compute_logits(
    fused: ComputeLogits, unfused: ComputeLogits, sizes: list[int], batch: Batch
) -> torch.Tensor | None:
    rows = len(batch.input_ids)
    is_fused = next((size for size in SIZES if size >= rows), None) in sizes
    return fused(batch) if is_fused else unfused(batch)


def _is_faster(
    fused: ComputeLogits,
    unfused: ComputeLogits,
    backend: Backend,
    batch: Batch,
    lengths: tuple[int, int],
) -> bool:
    """Return whether `fused` is faster for `batch`, with sequences of both `lengths`.

    Raises:
        ArithmeticError: its logits are not those of `unfused`.
    """
    device = batch.positions.device
    capture = CUDACapture(device)

    def step(compute_logits: ComputeLogits) -> torch.Tensor | None:
        return compute_logits(dataclasses.replace(batch, metadata=backend.plan(batch)))

    def replay(graph: Graph, length: int) -> None:
        _set_length(batch, length, backend.block_size)
        graph.replay()

    seconds = []
    found = []
    for compute_logits in (fused, unfused):
        graph, logits = capture(functools.partial(step, compute_logits))
        measured = measure_seconds(functools.partial(replay, graph), lengths, CUDA(device))
        assert logits is not None  # one rank has them all
        seconds.append([time for _, time in measured])
        outputs = []
        for length in lengths:
            replay(graph, length)
            outputs.append(logits.to(torch.float32, copy=True))  # the graphs share memory
        found.append(torch.stack(outputs))
    rows = len(batch.positions)
    difference = (found[0] - found[1]).abs().max()
    largest = found[1].abs().max()
    if not difference <= _TOLERANCE * largest:
        raise ArithmeticError(
            f"logits of {rows} rows differ by {difference:.3g}, the largest is {largest:.3g}"
        )
    logger.debug("%d tokens: fused %s s, unfused %s s", rows, *seconds)
    return all(ours < theirs for ours, theirs in zip(*seconds, strict=True))


def make_batch(
    rows: int, num_blocks: int, block_size: int, length: int, device: torch.device
) -> Batch:
    """Return a batch of `rows` rows of one token, the last of `length` tokens.

    No row has another one's first or last block. They share other blocks if the pool is small.
    """
    width = -(-length // block_size)
    blocks = torch.arange(rows * width, device=device) % (num_blocks - 2 * rows) + 2 * rows
    tables = blocks.int().view(rows, width)
    own = torch.arange(2 * rows, dtype=torch.int32, device=device).view(2, rows)
    tables[:, 0] = own[0]
    tables[:, -1] = own[1]
    last = torch.full((rows,), length - 1, device=device)
    batch = Batch(
        input_ids=torch.arange(rows, device=device),
        positions=last,
        slot_mapping=torch.zeros_like(last),
        cu_seqlens_q=torch.arange(rows + 1, dtype=torch.int32, device=device),
        seq_lens=torch.zeros_like(last, dtype=torch.int32),
        block_tables=tables,
    )
    _set_length(batch, length, block_size)
    return batch


def _set_length(batch: Batch, length: int, block_size: int) -> None:
    """Let all rows of `batch` have `length` tokens, in place."""
    place = length - 1
    batch.positions.fill_(place)
    batch.seq_lens.fill_(length)
    blocks = batch.block_tables[:, place // block_size].long()
    batch.slot_mapping.copy_(blocks * block_size + place % block_size)
