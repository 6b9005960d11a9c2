"""The Mistral families: Llama without biases; with experts; with latent attention."""

import dataclasses
from typing import Any, ClassVar

from torch import nn

from nanovllm.attention.spec import AttentionOptions
from nanovllm.errors import UnsupportedModelError
from nanovllm.models.decoder import DecoderForCausalLM, DecoderLayer, GatedMLP, SelfAttention
from nanovllm.models.deepseek import DeepseekV3ForCausalLM
from nanovllm.models.expert_parts import NUMBERED, deepseek_mlp, sparse_mlp
from nanovllm.models.model_config import ModelConfig
from nanovllm.models.parts import OTHER_MODALITIES


class MistralForCausalLM(DecoderForCausalLM):
    """Mistral 7B, Nemo and Small: Llama without biases; a window if the config has one."""

    left_out = OTHER_MODALITIES
    reads = frozenset({"layer_types"})

    def make_layer(self, config: ModelConfig, index: int) -> DecoderLayer:
        alike = config.fields.get("layer_types") is None
        window = config.window() if alike else config.windows(0)[index]
        options = AttentionOptions(window=window)
        rotary_emb = self.rotary_emb(config.rope, config.head_dim)
        attention = SelfAttention(config, rotary_emb, options=options)
        return DecoderLayer(config, attention, GatedMLP(config))


class Ministral3ForCausalLM(MistralForCausalLM):
    """Ministral 3, text only: Mistral, but queries grow with the logarithm of their position."""

    reads = frozenset({"llama_4_scaling_beta"})


class Mistral3ForConditionalGeneration(Ministral3ForCausalLM):
    """Mistral Small 3.1 and Ministral 3, with pictures: the text model is either of the two."""


class MixtralForCausalLM(DecoderForCausalLM):
    """Mixtral 8x7B and 8x22B: Mistral with experts in place of the MLP.

    The weights of a token's experts are a softmax over the logits of these experts.
    """

    names: ClassVar[dict[str, str]] = {".mlp.": ".block_sparse_moe."}
    reads = frozenset({"num_local_experts"})

    def make_layer(self, config: ModelConfig, index: int) -> DecoderLayer:
        rotary_emb = self.rotary_emb(config.rope, config.head_dim)
        options = AttentionOptions(window=config.window())
        attention = SelfAttention(config, rotary_emb, options=options)
        stored = NUMBERED
        mlp = sparse_mlp(config, config.intermediate_size, stored=stored, renormalize=True)
        return DecoderLayer(config, attention, mlp)


class Mistral4ForCausalLM(DeepseekV3ForCausalLM):
    """Mistral Small 4, text only: latent attention whose queries grow with the logarithm of
    their position; experts chosen by a softmax, and one that all tokens share.
    """

    left_out = OTHER_MODALITIES
    reads = frozenset({"llama_4_scaling_beta", "partial_rotary_factor"})
    only: ClassVar[dict[str, tuple[Any, ...]]] = {"moe_layer_freq": (1,)}

    def __init__(self, config: ModelConfig, max_model_len: int) -> None:
        super().__init__(_whole_rope(config), max_model_len)

    def make_experts(self, config: ModelConfig) -> nn.Module:
        return deepseek_mlp(config, sigmoid=False, choice_bias=False, wide=False)


def _whole_rope(config: ModelConfig) -> ModelConfig:
    """Return `config` whose rope rotates a whole part of qk_rope_head_dim numbers.

    Here partial_rotary_factor is the share of the part in a head: it changes nothing.
    """
    rope = config.size("qk_rope_head_dim")
    head_dim = config.size("qk_nope_head_dim") + rope
    partial = config.rope.partial
    if partial != 1.0 and int(head_dim * partial) != rope:
        raise UnsupportedModelError(
            f"config.json: partial_rotary_factor {partial} is not supported: of head_dim "
            f"{head_dim} qk_rope_head_dim {rope} numbers rotate"
        )
    return dataclasses.replace(config, rope=dataclasses.replace(config.rope, partial=1.0))
