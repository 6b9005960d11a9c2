"""The BERT and RoBERTa families: encoders, which make vectors and scores of texts.

A layer's norms come after attention and after the MLP, so each is stored with what comes before it;
here it is the first norm of what comes after it, and a layer adds to what it has normalised.
"""

import re
from collections.abc import Collection
from typing import Any, ClassVar

import torch
from torch import nn

from nanovllm.attention.batch import Batch
from nanovllm.attention.spec import AttentionOptions
from nanovllm.kernels.torch_kernels import TORCH, Kernels
from nanovllm.layers.layernorm import LayerNorm
from nanovllm.layers.pieces import SmallLinear, TensorRows
from nanovllm.models.config_fields import check_one_label
from nanovllm.models.decoder import Decoder, DecoderForCausalLM, DecoderLayer, SelfAttention
from nanovllm.models.model_config import ModelConfig
from nanovllm.models.parts import PlainMLP, PositionedDecoder, named_activation

_NORM = re.compile(r"model\.(?:layers\.(\d+)\.input_layernorm|norm)\.")


class EncoderLayer(DecoderLayer):
    """Attention and MLP, each of which adds to the norm that it reads."""

    def forward(
        self, hidden: torch.Tensor | None, residual: torch.Tensor, batch: Batch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        normed, _ = self.add_input(hidden, residual, batch)
        hidden = self.self_attn(normed, batch)
        normed, _ = self.post_attention_layernorm.add_norm(hidden, batch.outputs(normed))
        return self.mlp(normed), normed


class Encoder(PositionedDecoder):
    """The embeddings, the layers and the last norm. A token has a type: which text of a pair it is
    of.

    Args:
        takes_pairs: whether a row may be a pair, as the tokenizer writes it; otherwise it is one
            text.
        options: of `PositionedDecoder`.
    """

    def __init__(
        self, config: ModelConfig, layers: list[DecoderLayer], takes_pairs: bool, **options: Any
    ) -> None:
        super().__init__(config, layers, **options)
        num_types = config.size("type_vocab_size", 2)
        self.token_types = nn.Embedding(num_types, config.hidden_size)
        self._takes_pairs = takes_pairs and num_types > 1

    def embed(self, batch: Batch) -> torch.Tensor:
        embedded = super().embed(batch)
        table = self.token_types.weight.data
        if self._takes_pairs:
            rows = self.kernels.take_rows(table, token_types(batch))
        else:
            rows = torch.empty_like(embedded)
            self.kernels.copy(table[:1].expand_as(rows), rows)
        self.kernels.add(rows, embedded)
        return embedded


def token_types(batch: Batch) -> torch.Tensor:
    """Return 1 for the tokens of a second text, otherwise 0: [T] int64.

    A row has whole texts. The first one ends with the token that the row ends with, too.
    """
    size = len(batch.input_ids)
    starts, ends = batch.cu_seqlens_q[:-1].long(), batch.cu_seqlens_q[1:].long()

    def of_rows(values: torch.Tensor) -> torch.Tensor:
        return values.repeat_interleave(ends - starts, output_size=size)

    is_end = (batch.input_ids == of_rows(batch.input_ids[ends - 1])).long()
    before = is_end.cumsum(0) - is_end
    return (before > of_rows(before[starts])).long()


class BertModel(DecoderForCausalLM):
    """BGE, E5, GTE, MiniLM: attention in both directions, norms after attention and MLP,
    learned positions; makes vectors.
    """

    names: ClassVar[dict[str, str]] = {
        "model.embed_tokens.": "embeddings.word_embeddings.",
        "model.positions.": "embeddings.position_embeddings.",
        "model.token_types.": "embeddings.token_type_embeddings.",
        "model.layers.": "encoder.layer.",
        "self_attn.q_proj.": "attention.self.query.",
        "self_attn.k_proj.": "attention.self.key.",
        "self_attn.v_proj.": "attention.self.value.",
        "self_attn.o_proj.": "attention.output.dense.",
        "post_attention_layernorm.": "attention.output.LayerNorm.",
        "mlp.up_proj.": "intermediate.dense.",
        "mlp.down_proj.": "output.dense.",
    }
    prefix: ClassVar[str] = "bert."
    """Of the encoder's tensors, where the checkpoint has a head, too."""
    left_out: ClassVar[tuple[str, ...]] = (
        "pooler.",
        "cls.",
        "lm_head.",
        ".pooler.dense.weight",
        ".pooler.dense.bias",
        ".position_ids",
    )
    norm: ClassVar[dict[str, Any]] = {"layer": LayerNorm}
    aliases: ClassVar[dict[str, str]] = {"rms_norm_eps": "layer_norm_eps"}
    reads = frozenset({"hidden_act"})
    ignores = frozenset({"num_key_value_heads", "head_dim", "tie_word_embeddings"})
    only: ClassVar[dict[str, tuple[Any, ...]]] = {
        "position_embedding_type": ("absolute",),
        "is_decoder": (False,),
    }
    takes_pairs: ClassVar[bool] = False

    def __init__(self, config: ModelConfig, max_model_len: int) -> None:
        super().__init__(config, max_model_len)
        self._num_layers = config.num_layers
        del self.lm_head

    def make_layer(self, config: ModelConfig, index: int) -> DecoderLayer:
        attention = SelfAttention(
            config,
            self.rotary_emb(None, config.head_dim),
            output_bias=True,
            options=AttentionOptions(causal=False),
            bias=True,
        )
        mlp = PlainMLP(config, named_activation(config), bias=True)
        return EncoderLayer(config, attention, mlp, **self.norm)

    def make_decoder(self, config: ModelConfig, layers: list[DecoderLayer]) -> Decoder:
        return Encoder(
            config,
            layers,
            self.takes_pairs,
            skipped=self.skipped_positions,
            no_position=self.no_position,
            **self.norm,
        )

    def checkpoint_name(self, name: str, known: Collection[str]) -> str:
        if found := _NORM.match(name):
            index = self._num_layers if found[1] is None else int(found[1])
            before = f"encoder.layer.{index - 1}.output" if index else "embeddings"
            name = f"{before}.LayerNorm.{name[found.end() :]}"
        return super().checkpoint_name(name, known)

    def published_names(self, name: str) -> tuple[str, ...]:
        old = name.replace("LayerNorm.weight", "LayerNorm.gamma")
        old = old.replace("LayerNorm.bias", "LayerNorm.beta")
        return (old, f"{self.prefix}{name}", f"{self.prefix}{old}")


class BertForMaskedLM(BertModel):
    """BERT"""


class ScoreHead(nn.Module):
    """Makes the one logit of a pair of texts from the hidden state of its first token."""

    kernels: Kernels = TORCH

    def __init__(self, size: int) -> None:
        super().__init__()
        self.dense = SmallLinear(size, [TensorRows("dense", size, 0, size)], bias=True)
        self.out_proj = nn.Linear(size, 1, dtype=torch.float32)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits [N, 1] float32 of `hidden` [N, hidden_size]."""
        pooled = torch.tanh(self.dense(hidden))
        return self.kernels.wide_linear(pooled, self.out_proj.weight) + self.out_proj.bias


class BertForSequenceClassification(BertModel):
    """MS MARCO cross-encoders: BERT with a head that scores a pair of texts."""

    names: ClassVar[dict[str, str]] = {
        **BertModel.names,
        "classifier.dense.": "pooler.dense.",
        "classifier.out_proj.": "classifier.",
    }
    left_out: ClassVar[tuple[str, ...]] = (".position_ids",)
    takes_pairs = True

    def __init__(self, config: ModelConfig, max_model_len: int) -> None:
        super().__init__(config, max_model_len)
        check_one_label(config.fields)
        self.classifier = ScoreHead(config.hidden_size)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor | None:
        """Return the logits [N, 1] float32 of `hidden` [N, hidden_size], of first tokens."""
        return self.classifier(hidden)


class RobertaModel(BertModel):
    """RoBERTa, Granite Embedding: BERT without types of tokens; makes vectors."""

    prefix = "roberta."
    skipped_positions = 2
    no_position = 1
    only: ClassVar[dict[str, tuple[Any, ...]]] = {**BertModel.only, "pad_token_id": (1,)}


class RobertaForMaskedLM(RobertaModel):
    """DistilRoBERTa"""


class XLMRobertaModel(RobertaModel):
    """Multilingual E5, BGE M3: BERT without types of tokens; makes vectors."""


class RobertaForSequenceClassification(BertForSequenceClassification):
    """RoBERTa cross-encoders: RoBERTa with a head that scores a pair of texts."""

    names = BertModel.names
    left_out = (".pooler.dense.weight", ".pooler.dense.bias", ".position_ids")
    prefix = RobertaModel.prefix
    skipped_positions = RobertaModel.skipped_positions
    no_position = RobertaModel.no_position
    only = RobertaModel.only
    takes_pairs = False


class XLMRobertaForSequenceClassification(RobertaForSequenceClassification):
    """BGE rerankers: RoBERTa with a head that scores a pair of texts."""
