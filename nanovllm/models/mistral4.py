"""The Mistral Small 4 family: latent attention whose queries grow with their position; experts."""

import dataclasses
from typing import Any, ClassVar

from torch import nn

from nanovllm.errors import UnsupportedModelError
from nanovllm.layers.rotary_embedding import RopeConfig, RotaryEmbedding
from nanovllm.models.deepseek import DeepseekV3ForCausalLM
from nanovllm.models.expert_parts import deepseek_mlp
from nanovllm.models.mistral import GrowingQueries
from nanovllm.models.model_config import ModelConfig
from nanovllm.models.parts import OTHER_MODALITIES


class Mistral4ForCausalLM(DeepseekV3ForCausalLM):
    """Mistral Small 4, text only: latent attention whose queries grow with the logarithm of
    their position; experts chosen by a softmax, and one that all tokens share.
    """

    left_out = OTHER_MODALITIES
    reads = frozenset({"llama_4_scaling_beta", "partial_rotary_factor"})
    only: ClassVar[dict[str, tuple[Any, ...]]] = {"moe_layer_freq": (1,)}

    def __init__(self, config: ModelConfig, max_model_len: int) -> None:
        self._queries = GrowingQueries(config)
        super().__init__(_whole_rope(config), max_model_len)

    def make_experts(self, config: ModelConfig) -> nn.Module:
        return deepseek_mlp(config, sigmoid=False, choice_bias=False, wide=False)

    def rotary_emb(self, rope: RopeConfig | None, head_dim: int) -> RotaryEmbedding:
        return self._queries.grow(super().rotary_emb(rope, head_dim))


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
