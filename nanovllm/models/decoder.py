"""The decoder that model families describe: pre-norm layers of attention and a gated MLP.

A family composes its layers from these parts; what differs is an argument. Modules have the names
of the checkpoint. Shapes: T tokens in the batch, O tokens in `batch.output_indices` (None: all T).
Only attention reads the batch's rows.
"""

import re
from collections.abc import Callable, Collection
from typing import Any, ClassVar

import torch
from torch import nn

from nanovllm.attention.batch import Batch
from nanovllm.attention.spec import PLAIN, AttentionOptions, QKNormRope
from nanovllm.kernels.torch_math import NORM_ROUNDED
from nanovllm.layers.activation import ActAndMul
from nanovllm.layers.attention import Attention, qk_norm_rope
from nanovllm.layers.embed_head import ParallelLMHead, VocabParallelEmbedding
from nanovllm.layers.layernorm import Norm, RMSNorm
from nanovllm.layers.linear import MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from nanovllm.layers.rotary_embedding import RopeConfig, RotaryEmbedding
from nanovllm.models.model_config import ModelConfig


class SelfAttention(nn.Module):
    """Grouped-query attention. parts.py has its variants.

    Args:
        output_bias: whether o_proj has a bias.
        qk_norm: whether an RMSNorm is applied to each query head and each key head.
        norm_kind: kind of these norms, see `RMSNorm`.
        options, source: see `Attention`.
        input_size: input size of the projections; None: hidden_size.
        projections: options of `QKVParallelLinear`.
    """

    def __init__(
        self,
        config: ModelConfig,
        rotary_emb: RotaryEmbedding,
        *,
        output_bias: bool = False,
        qk_norm: bool = False,
        norm_kind: int = NORM_ROUNDED,
        options: AttentionOptions = PLAIN,
        source: Attention | None = None,
        input_size: int | None = None,
        **projections: Any,
    ) -> None:
        super().__init__()
        hidden_size = config.hidden_size
        head_dim = config.head_dim
        heads = config.num_heads
        self.rotary_emb = rotary_emb
        projections.setdefault("bias", False)
        qkv = self.qkv_proj = QKVParallelLinear(
            input_size or hidden_size, heads, config.num_kv_heads, head_dim, **projections
        )
        self.o_proj = RowParallelLinear(heads * head_dim, hidden_size, bias=output_bias)
        # These two only hold weights: the attention backend normalises.
        norm = config.rms_norm_eps, norm_kind
        self.q_norm = RMSNorm(head_dim, *norm) if qk_norm else None
        self.k_norm = RMSNorm(head_dim, *norm) if qk_norm and "k_proj" in qkv.slices else None
        self.attn = Attention(qkv.num_heads, qkv.num_kv_heads, head_dim, options, source)

    def qk_norm_rope(self) -> QKNormRope:
        """Return how queries and keys are normalised and rotated."""
        return qk_norm_rope(self.q_norm, self.k_norm, self.rotary_emb)

    def attend(self, qkv: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Write the KV of all T tokens; return the heads [T, num_heads, head_dim]."""
        return self.attn(qkv, self.qk_norm_rope(), batch)

    def forward(self, hidden: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Write the KV of all T tokens; return [O, hidden_size] for `hidden` [T, input_size]."""
        heads = self.attend(self.qkv_proj(hidden), batch)
        return self.o_proj(batch.outputs(heads).flatten(1))


class GatedMLP(nn.Module):
    """A gated linear unit: down_proj(act(gate_proj(x)) * up_proj(x)).

    Args:
        bias: whether the three linears have a bias.
        activation: see `Kernels.act_and_mul`.
        fused: whether the checkpoint has one gate_up_proj.
    """

    def __init__(
        self, config: ModelConfig, bias: bool = False, activation: str = "silu", fused: bool = False
    ) -> None:
        super().__init__()
        size = config.intermediate_size
        outputs = {"gate_proj": size, "up_proj": size}
        self.gate_up_proj = MergedColumnParallelLinear(
            config.hidden_size, outputs, bias=bias, fused=fused
        )
        self.down_proj = RowParallelLinear(size, config.hidden_size, bias=bias)
        self.act = ActAndMul(activation)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act(self.gate_up_proj(hidden)))


def make_norm(config: ModelConfig, layer: Callable[..., Norm] = RMSNorm, **options: Any) -> Norm:
    """Return a norm of hidden states."""
    return layer(config.hidden_size, config.rms_norm_eps, **options)


class DecoderLayer(nn.Module):
    """Attention and MLP, each after a norm. parts.py has layers with norms elsewhere.

    The layer returns its MLP output and the residual separately; the next `add_norm` adds them and
    normalises the sum. The residual changes in place.

    Args:
        self_attn: called like `SelfAttention`.
        mlp: maps [T, hidden_size] to [T, hidden_size].
        norm: options of the norms, see `make_norm`.
    """

    def __init__(
        self, config: ModelConfig, self_attn: nn.Module, mlp: nn.Module, **norm: Any
    ) -> None:
        super().__init__()
        self.self_attn = self_attn
        self.mlp = mlp
        self.input_layernorm = make_norm(config, **norm)
        self.post_attention_layernorm = make_norm(config, **norm)
        self.store_input: Callable[[torch.Tensor, torch.Tensor], None] | None = None
        """Called with the layer's input sum of all T tokens and their slots; None: not needed."""

    def forward(
        self, hidden: torch.Tensor | None, residual: torch.Tensor, batch: Batch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the KV of all T tokens; return (MLP output, residual), [O, hidden_size] each.

        Args:
            hidden: [T, hidden_size], the previous layer's MLP output; None in the first layer.
            residual: [T, hidden_size].
        """
        hidden, residual = self.add_input(hidden, residual, batch)
        hidden = self.self_attn(hidden, batch)
        hidden, residual = self.post_attention_layernorm.add_norm(hidden, batch.outputs(residual))
        return self.mlp(hidden), residual

    def add_input(
        self, hidden: torch.Tensor | None, residual: torch.Tensor, batch: Batch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Begin `forward`, which has these arguments: add `hidden` to `residual` in place.

        Returns:
            (norm of the sum, the sum), [T, hidden_size] each.
        """
        hidden, residual = self.input_layernorm.add_norm(hidden, residual)
        if self.store_input is not None:
            self.store_input(residual, batch.slot_mapping)
        return hidden, residual


class Decoder(nn.Module):
    """The embedding, the layers and the last norm.

    Args:
        layers: the family's layers, in order.
        norm: options of the last norm, see `make_norm`.
    """

    def __init__(self, config: ModelConfig, layers: list[DecoderLayer], **norm: Any) -> None:
        super().__init__()
        self.embed_tokens = VocabParallelEmbedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(layers)
        self.norm = make_norm(config, **norm)

    def forward(self, batch: Batch) -> torch.Tensor:
        residual = self.first_input(batch)
        size = residual.shape[1]
        hidden: torch.Tensor | None = None
        whole = batch.before_last
        for number, layer in enumerate(self.layers, 1):
            of_layer = batch if layer is self.layers[-1] else whole
            hidden, residual = layer(hidden, residual, of_layer)
            for indices, values in batch.embeds:
                if number * size < values.shape[1]:
                    hidden[indices] += values[:, number * size :][:, :size].to(hidden.dtype)
        hidden, _ = self.norm.add_norm(hidden, residual)
        return hidden

    def first_input(self, batch: Batch) -> torch.Tensor:
        """Return what the first layer reads: [T, hidden_size]."""
        residual = self.embed(batch)
        for indices, values in batch.embeds:
            residual[indices] = values[:, : residual.shape[1]].to(residual.dtype)
        return residual

    def embed(self, batch: Batch) -> torch.Tensor:
        """Return the embeddings of all tokens, in memory of their own: [T, hidden_size]."""
        return self.embed_tokens(batch.input_ids)


class Family(nn.Module):
    """What a model family declares besides its layers: fields of config.json, names of tensors.

    Args:
        max_model_len: number of positions in the tables of rotary angles.
    """

    defaults: ClassVar[dict[str, Any]] = {}
    """The family's values of fields that a config.json may lack."""
    aliases: ClassVar[dict[str, str]] = {}
    """The family's names for some common fields: see `ModelConfig.from_hf`."""
    reads: ClassVar[frozenset[str]] = frozenset()
    """The fields of `model_config.ONLY_SOME_READ` that the family honours."""
    ignores: ClassVar[frozenset[str]] = frozenset()
    """Fields that a config.json may have and that neither transformers nor the family applies."""
    names: ClassVar[dict[str, str]] = {}
    """The checkpoint's names for modules that have other names here."""
    published: ClassVar[dict[str, str]] = {}
    """What stands in place of parts of these names in published files, if not in transformers'."""
    left_out: ClassVar[tuple[str, ...]] = ()
    """Tensors that the network does not need and does not load: the beginnings of their names, or
    their ends where a "." comes first."""
    interleaved: ClassVar[bool] = False
    """Whether the pairs that rotate are adjacent numbers of a head. See `QKNormRope`."""
    only: ClassVar[dict[str, tuple[Any, ...]]] = {}
    """The values that some fields may have: others are refused."""
    skipped_positions: ClassVar[int] = 0
    """Of max_position_embeddings: rows of a table that no position has."""
    no_position: ClassVar[int | None] = None
    """The token that takes no position of its own, if there is one: see `PositionedDecoder`."""
    norm: ClassVar[dict[str, Any]] = {}
    """Options of the norms, see `make_norm`."""
    decoder: ClassVar[type[Decoder]] = Decoder
    """What embedding, layers and last norm are in."""

    def __init__(self, max_model_len: int) -> None:
        super().__init__()
        self.max_model_len = max_model_len
        self.rotary: dict[tuple[RopeConfig | None, int], RotaryEmbedding] = {}

    def rotary_emb(self, rope: RopeConfig | None, head_dim: int) -> RotaryEmbedding:
        """Return the rotary embedding for `rope` (None: no rotation). Equal ones are shared."""
        key = rope, head_dim
        if key not in self.rotary:
            frequencies = torch.zeros(head_dim // 2, device="cpu"), 1.0
            if rope is not None:
                frequencies = rope.inverse_frequencies(head_dim, self.max_model_len)
            self.rotary[key] = RotaryEmbedding(self.max_model_len, *frequencies)
            self.rotary[key].interleaved = self.interleaved
            if rope is not None and rope.query_growth:
                self.rotary[key].q_scale = rope.query_scale(self.max_model_len)
        return self.rotary[key]

    def checkpoint_name(self, name: str, known: Collection[str]) -> str:
        """Return the checkpoint's name for tensor `name`. See `Renamed` in loading/shards.py."""
        if self.names:
            pattern = "|".join(map(re.escape, self.names))
            name = re.sub(pattern, lambda found: self.names[found[0]], name)
        return next((each for each in self.all_names(name) if each in known), name)

    def all_names(self, name: str) -> list[str]:
        """Return the names that checkpoints may have for the tensor that transformers calls `name`,
        which is the first.
        """
        label = ["score.weight"] if name == "lm_head.weight" else []
        names = name, *self.published_names(name), *label
        return [placed for each in names for placed in placed_names(each)]

    def published_names(self, name: str) -> tuple[str, ...]:
        """Return the names that files of the family have in place of transformers' `name`, or
        transformers' own modules in place of the `name` in its files.
        """
        found = name
        for ours, theirs in self.published.items():
            found = found.replace(ours, theirs)
        return (found,) if self.published else ()


def placed_names(name: str) -> tuple[str, ...]:
    """Return the names that a checkpoint's tensor `name` may have: a model that also takes images
    nests its text model, and one without a head is not nested at all.
    """
    nested = name.replace("model.", "model.language_model.", 1)
    return name, nested, f"language_model.{name}", name.removeprefix("model.")


class DecoderForCausalLM(Family):
    """The base of a family: a decoder with its language-model head."""

    def __init__(self, config: ModelConfig, max_model_len: int) -> None:
        super().__init__(max_model_len)
        for key, values in self.only.items():
            config.only(key, *values)
        layers = [self.make_layer(config, index) for index in range(config.num_layers)]
        self.model = self.make_decoder(config, layers)
        num_logits = 1 if config.has_label else config.vocab_size
        self.lm_head = ParallelLMHead(num_logits, config.hidden_size)
        self.ignored_weights = frozenset(self.left_out)  # checkpoint names not to load
        num_drafting = config.size("num_nextn_predict_layers", 0, high=64, low=0)
        for index in range(config.num_layers, config.num_layers + num_drafting):
            self.ignored_weights |= {f"model.layers.{index}."}
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight
            self.ignored_weights |= {"lm_head.weight", "language_model.lm_head.weight"}

    def make_layer(self, config: ModelConfig, index: int) -> DecoderLayer:
        """Return layer `index` of the family, which makes them in order."""
        raise NotImplementedError

    def make_decoder(self, config: ModelConfig, layers: list[DecoderLayer]) -> Decoder:
        """Return the network of `layers`."""
        return self.decoder(config, layers, **self.norm)

    def forward(self, batch: Batch) -> torch.Tensor:
        """Write the batch's KV; return the hidden states [O, hidden_size] after the last norm."""
        return self.model(batch)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor | None:
        """Return logits [N, vocab_size] of `hidden` [N, hidden_size]; None except on rank 0."""
        return self.lm_head(hidden)
