"""The Qwen3.5 family, text model only: Qwen3-Next with other projections, dense or MoE."""

from typing import Any, ClassVar

from torch import nn

from nanovllm.models.decoder import GatedMLP
from nanovllm.models.expert_parts import shared_expert_mlp
from nanovllm.models.model_config import ModelConfig
from nanovllm.models.qwen3_next import Qwen3NextForCausalLM

_READS = frozenset(
    {
        "layer_types",
        "partial_rotary_factor",
        "mrope_section",
        "mrope_interleaved",
        "attn_output_gate",
    }
)


class Qwen3_5ForCausalLM(Qwen3NextForCausalLM):
    """Qwen3.5, Qwen3.6 and Qwen3.8 (dense), text only: three of four layers are gated DeltaNets,
    which keep a state; the fourth has gated attention.
    """

    grouped = False
    reads = _READS

    def make_mlp(self, config: ModelConfig, index: int) -> nn.Module:
        return GatedMLP(config)


class Qwen3_5ForConditionalGeneration(Qwen3_5ForCausalLM):
    """Qwen3.5 0.8B to 27B, Qwen3.6-27B and Qwen3.8-27B, without images."""


class Qwen3_5MoeForCausalLM(Qwen3NextForCausalLM):
    """Qwen3.5-MoE, text only: Qwen3.5 with experts, and one that all tokens share."""

    grouped = False
    defaults: ClassVar[dict[str, Any]] = {"intermediate_size": 512}  # which no layer has
    reads = _READS | {"num_experts"}

    def make_mlp(self, config: ModelConfig, index: int) -> nn.Module:
        return shared_expert_mlp(config, renormalize=True)


class Qwen3_5MoeForConditionalGeneration(Qwen3_5MoeForCausalLM):
    """Qwen3.5-35B-A3B, 122B-A10B and 397B-A17B, Qwen3.6-35B-A3B, without images."""
