"""The Gemma 4 family: embeddings for each layer, and a factor on the layer's sum."""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import nn

from nanovllm.attention.batch import Batch
from nanovllm.attention.spec import AttentionOptions, QKNormRope
from nanovllm.errors import CheckpointError
from nanovllm.kernels.torch_kernels import TORCH, Kernels
from nanovllm.kernels.torch_math import NORM_WIDE
from nanovllm.layers.attention import Attention
from nanovllm.layers.experts import MAX_EXPERTS, Experts, NormedRouter, StoredExperts
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.linear import LinearBase
from nanovllm.layers.rotary_embedding import RopeConfig, RotaryEmbedding
from nanovllm.models.config_fields import config_size
from nanovllm.models.decoder import DecoderLayer, GatedMLP, SelfAttention
from nanovllm.models.model_config import ModelConfig
from nanovllm.models.parts import (
    GELU_TANH,
    OTHER_MODALITIES,
    SandwichForCausalLM,
    SandwichLayer,
    ScaledDecoder,
    ScaledEmbedding,
)
from nanovllm.options.validation import shown


def full_attention_sizes(config: ModelConfig, index: int) -> ModelConfig:
    """Return `config` with the heads of layer `index`, which has full attention.

    transformers writes them in per_layer_config; the published checkpoints have a field for each.
    """
    layers = config.fields.get("per_layer_config") or {}
    own = layers.get(str(index), {}) if isinstance(layers, dict) else None
    if not isinstance(own, dict):
        raise CheckpointError(
            f"config.json: per_layer_config must be an object of objects, is {shown(layers)}"
        )
    if not own:
        own = {"head_dim": config.size("global_head_dim", 512)}
        if config.flag("attention_k_eq_v"):
            num_kv_heads = config.size("num_global_key_value_heads", config.num_kv_heads)
            own["num_key_value_heads"] = num_kv_heads
    head_dim = config_size(own, "head_dim", config.head_dim)
    num_kv_heads = config_size(own, "num_key_value_heads", config.num_kv_heads)
    return dataclasses.replace(config, head_dim=head_dim, num_kv_heads=num_kv_heads)


class Gemma4Attention(SelfAttention):
    """Attention that also normalises values.

    Args:
        index: the layer's. The last `num_kv_shared_layers` layers have no keys and values.
        sources: for each layer type, the last layer so far that has keys and values.
        rotary_emb: see `Family.rotary_emb`.
    """

    def __init__(
        self,
        config: ModelConfig,
        index: int,
        sources: dict[str, Attention],
        rotary_emb: Callable[[RopeConfig | None, int], RotaryEmbedding],
    ) -> None:
        layer_type = [*config.layer_types(6)[:-1], "full_attention"][index]
        is_full = layer_type == "full_attention"
        self.shares = index >= config.num_layers - config.count("num_kv_shared_layers")
        if self.shares and layer_type not in sources:
            raise CheckpointError(
                f"config.json: num_kv_shared_layers: by layer_types, no layer of type {layer_type} "
                "has keys and values"
            )
        sizes = full_attention_sizes(config, index) if is_full else config
        rope = sizes.rope_of(layer_type)
        window = None if is_full else config.size("sliding_window")
        parts = "qk" if is_full and config.flag("attention_k_eq_v") else "qkv"
        super().__init__(
            sizes,
            rotary_emb(rope, sizes.head_dim),
            qk_norm=True,
            norm_kind=NORM_WIDE,
            options=AttentionOptions(scale=1.0, window=window),
            parts="q" if self.shares else parts,
            source=sources[layer_type] if self.shares else None,
        )
        if not self.shares:
            sources[layer_type] = self.attn

    def qk_norm_rope(self) -> QKNormRope:
        return super().qk_norm_rope()._replace(v_norm=True)


class Gemma4Layer(SandwichLayer):
    """A layer that adds a per-layer embedding after the MLP and multiplies the sum by a scalar."""

    kernels: Kernels = TORCH

    def __init__(
        self, config: ModelConfig, self_attn: SelfAttention, mlp: nn.Module, **norm: Any
    ) -> None:
        super().__init__(config, self_attn, mlp, **norm)
        self.layer_scalar = nn.Parameter(torch.empty(1))
        if size := config.count("hidden_size_per_layer_input"):
            hidden_size = config.hidden_size
            eps = config.rms_norm_eps
            self.per_layer_input_gate = LinearBase(hidden_size, size)
            self.per_layer_projection = LinearBase(size, hidden_size)
            self.post_per_layer_input_norm = RMSNorm(hidden_size, eps, NORM_WIDE)

    def finish(
        self, hidden: torch.Tensor, residual: torch.Tensor, own_input: torch.Tensor | None
    ) -> torch.Tensor:
        """Return the layer's output [O, hidden_size] from what `forward` returned.

        Args:
            own_input: this layer's embeddings [O, hidden_size_per_layer_input].
        """
        self.kernels.add(hidden, residual)
        if own_input is not None:
            gate = self.per_layer_input_gate(residual)
            added = self.per_layer_projection(self.kernels.mul_act(gate, own_input, "gelu_tanh"))
            self.kernels.add(self.post_per_layer_input_norm(added), residual)
        self.kernels.scale(residual, self.layer_scalar)
        return residual


class Gemma4ExpertsLayer(Gemma4Layer):
    """A layer with experts parallel to its MLP, which read the residual through separate norms."""

    def __init__(
        self, config: ModelConfig, self_attn: SelfAttention, mlp: nn.Module, **norm: Any
    ) -> None:
        super().__init__(config, self_attn, mlp, **norm)
        hidden_size = config.hidden_size
        eps = config.rms_norm_eps
        num_experts = config.size("num_experts", high=MAX_EXPERTS)
        top_k = config.size("top_k_experts", high=num_experts)
        self.router = NormedRouter(hidden_size, num_experts, top_k, eps)
        self.experts = Experts(
            num_experts,
            hidden_size,
            config.size("moe_intermediate_size"),
            activation="gelu_tanh",
            stored=StoredExperts(linears=None),
        )
        self.post_feedforward_layernorm_1 = RMSNorm(hidden_size, eps, NORM_WIDE)
        self.post_feedforward_layernorm_2 = RMSNorm(hidden_size, eps, NORM_WIDE)
        self.pre_feedforward_layernorm_2 = RMSNorm(hidden_size, eps, NORM_WIDE)

    def feed_forward(self, hidden: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        total = self.post_feedforward_layernorm_1(self.mlp(hidden))
        routed = self.experts(self.pre_feedforward_layernorm_2(residual), self.router(residual))
        self.kernels.add(self.post_feedforward_layernorm_2(routed), total)
        return total


class Gemma4Decoder(ScaledDecoder):
    """The decoder with a second embedding, one slice of which enters each layer."""

    kernels: Kernels = TORCH

    def __init__(self, config: ModelConfig, layers: list[DecoderLayer], **norm: Any) -> None:
        super().__init__(config, layers, **norm)
        hidden_size = config.hidden_size
        self._size = size = config.count("hidden_size_per_layer_input")
        if size:
            vocab_size = config.size("vocab_size_per_layer_input")
            self._pad_token_id = config.size("pad_token_id", 0, high=vocab_size - 1, low=0)
            width = len(layers) * size
            self.embed_tokens_per_layer = ScaledEmbedding(vocab_size, width, size**0.5)
            self.per_layer_model_projection = LinearBase(hidden_size, width)
            self.per_layer_projection_norm = RMSNorm(size, config.rms_norm_eps, NORM_WIDE)

    def forward(self, batch: Batch) -> torch.Tensor:
        residual = self.first_input(batch)
        inputs = self._layer_inputs(batch, residual) if self._size else None
        whole = batch.before_last
        for index, layer in enumerate(self.layers):
            assert isinstance(layer, Gemma4Layer)
            of_layer = batch if layer is self.layers[-1] else whole
            hidden, residual = layer(None, residual, of_layer)
            own = None
            if inputs is not None:
                own = of_layer.outputs(inputs[:, index * self._size : (index + 1) * self._size])
            residual = layer.finish(hidden, residual, own)
        hidden, _ = self.norm.add_norm(None, residual)
        return hidden

    def _layer_inputs(self, batch: Batch, embedded: torch.Tensor) -> torch.Tensor:
        """Return the inputs of all layers, concatenated: [T, layers * hidden_size_per_layer_input].

        They are the mean of an embedding and a projection of the first one, times sqrt(2). Soft
        tokens have the padding token's embedding.
        """
        input_ids = batch.input_ids
        for indices, _ in batch.embeds:
            input_ids = input_ids.index_fill(0, indices, self._pad_token_id)
        norm = self.per_layer_projection_norm
        projected = self.per_layer_model_projection(embedded)
        self.kernels.scale(projected, embedded.shape[1] ** -0.5)
        for start in range(0, projected.shape[1], self._size):
            own = projected[:, start : start + self._size]
            self.kernels.rms_norm(own, norm.weight, norm.eps, norm.kind, out=own)
        self.kernels.add(self.embed_tokens_per_layer(input_ids), projected)
        self.kernels.scale(projected, 2.0**-0.5)
        return projected


class Gemma4ForCausalLM(SandwichForCausalLM):
    """Gemma 4, text only: norms on both sides, and of queries, keys and values; five of six layers
    have a window; E2B and E4B have embeddings for each layer, the 26B-A4B has experts.
    """

    left_out = OTHER_MODALITIES
    ignores = frozenset({"partial_rotary_factor"})  # but not in rope_parameters
    norm: ClassVar[dict[str, Any]] = {"kind": NORM_WIDE}
    only = GELU_TANH
    decoder = Gemma4Decoder
    reads = frozenset(
        {
            *GELU_TANH,
            "enable_moe_block",
            "num_experts",
            "final_logit_softcapping",
            "layer_types",
            "rope_parameters",
            "partial_rotary_factor",
        }
    )

    def __init__(self, config: ModelConfig, max_model_len: int) -> None:
        self._sources: dict[str, Attention] = {}
        super().__init__(config, max_model_len)

    def make_layer(self, config: ModelConfig, index: int) -> DecoderLayer:
        attention = Gemma4Attention(config, index, self._sources, self.rotary_emb)
        doubled = attention.shares and config.flag("use_double_wide_mlp")
        size = config.intermediate_size * (1 + doubled)
        wide = dataclasses.replace(config, intermediate_size=size)
        mlp = GatedMLP(wide, activation="gelu_tanh")
        layer = Gemma4ExpertsLayer if config.flag("enable_moe_block") else Gemma4Layer
        return layer(config, attention, mlp, **self.norm)


class Gemma4ForConditionalGeneration(Gemma4ForCausalLM):
    """Gemma 4 E2B, E4B, 31B and 26B-A4B, with pictures, without audio."""


class Gemma4UnifiedForCausalLM(Gemma4ForCausalLM):
    """Gemma 4 12B, text only."""


class Gemma4UnifiedForConditionalGeneration(Gemma4UnifiedForCausalLM):
    """Gemma 4 12B, with pictures, without audio."""
