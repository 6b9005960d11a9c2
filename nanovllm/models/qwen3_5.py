"""The Qwen3-Next and Qwen3.5 families: gated DeltaNets and gated attention."""

from typing import Any, ClassVar

from torch import nn

from nanovllm.kernels.torch_math import NORM_CENTRED
from nanovllm.models.decoder import DecoderForCausalLM, DecoderLayer, GatedMLP
from nanovllm.models.expert_parts import expect_stored, is_dense, shared_expert_mlp
from nanovllm.models.hybrid_parts import DELTA_NAMES, HeadGatedAttention, check_mixed, delta_net
from nanovllm.models.model_config import ModelConfig
from nanovllm.models.parts import OTHER_MODALITIES


class Qwen3NextForCausalLM(DecoderForCausalLM):
    """Qwen3-Next-80B-A3B: three of four layers are gated DeltaNets, which keep a state; the fourth
    has gated attention; experts, and one that all tokens share.
    """

    expect = expect_stored
    grouped = True
    """See `GatedDeltaNet`."""
    names: ClassVar[dict[str, str]] = DELTA_NAMES
    left_out = OTHER_MODALITIES
    norm: ClassVar[dict[str, Any]] = {"kind": NORM_CENTRED}
    reads = frozenset({"layer_types", "partial_rotary_factor", "attn_output_gate", "num_experts"})

    def make_layer(self, config: ModelConfig, index: int) -> DecoderLayer:
        interval = config.size("full_attention_interval", 4)
        mlp = self.make_mlp(config, index)
        types = check_mixed(config.layer_types(interval, "linear_attention"))
        if types[index] == "linear_attention":
            mixer = delta_net(config, grouped=self.grouped)
            return DecoderLayer(config, mixer, mlp, **self.norm)
        attention = HeadGatedAttention(config, self.rotary_emb(config.rope, config.head_dim))
        return DecoderLayer(config, attention, mlp, **self.norm)

    def make_mlp(self, config: ModelConfig, index: int) -> nn.Module:
        """Return the MLP of layer `index`, or its experts."""
        if is_dense(config, index) or not config.count("num_experts"):
            return GatedMLP(config)
        return shared_expert_mlp(config, renormalize=config.flag("norm_topk_prob"))


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
    """Qwen3.5 0.8B to 27B, Qwen3.6-27B and Qwen3.8-27B, with pictures."""


class Qwen3_5MoeForCausalLM(Qwen3NextForCausalLM):
    """Qwen3.5-MoE, text only: Qwen3.5 with experts, and one that all tokens share."""

    grouped = False
    defaults: ClassVar[dict[str, Any]] = {"intermediate_size": 512}  # which no layer has
    reads = _READS | {"num_experts"}

    def make_mlp(self, config: ModelConfig, index: int) -> nn.Module:
        return shared_expert_mlp(config, renormalize=True)


class Qwen3_5MoeForConditionalGeneration(Qwen3_5MoeForCausalLM):
    """Qwen3.5-35B-A3B, 122B-A10B and 397B-A17B, Qwen3.6-35B-A3B, with pictures."""
