"""The ERNIE 4.5 families: Llama with rotary pairs of adjacent numbers, and with experts."""

from typing import Any, ClassVar

from torch import nn

from nanovllm.models.decoder import DecoderForCausalLM, DecoderLayer, GatedMLP, SelfAttention
from nanovllm.models.expert_parts import sparse_mlp, with_shared
from nanovllm.models.model_config import ModelConfig


class Ernie4_5ForCausalLM(DecoderForCausalLM):
    """ERNIE 4.5 0.3B: Llama with rotary pairs of adjacent numbers; biases if the config says so."""

    interleaved: ClassVar[bool] = True

    def make_layer(self, config: ModelConfig, index: int) -> DecoderLayer:
        bias = config.flag("use_bias")
        rotary_emb = self.rotary_emb(config.rope, config.head_dim)
        attention = SelfAttention(config, rotary_emb, bias=bias, output_bias=bias)
        return DecoderLayer(config, attention, self.make_mlp(config, index, bias))

    def make_mlp(self, config: ModelConfig, index: int, bias: bool) -> nn.Module:
        """Return the MLP of layer `index`, or its experts."""
        return GatedMLP(config, bias=bias)


class Ernie4_5_MoeForCausalLM(Ernie4_5ForCausalLM):
    """ERNIE 4.5 21B-A3B and 300B-A47B: ERNIE 4.5 with experts after the first layers, and one that
    all tokens share.
    """

    names: ClassVar[dict[str, str]] = {
        "mlp.expert_bias": "mlp.moe_statics.e_score_correction_bias",
        "mlp.shared_expert.": "mlp.shared_experts.",
    }
    left_out = tuple(
        f"model.mtp_{part}." for part in ("block", "emb_norm", "hidden_norm", "linear_proj")
    )

    only: ClassVar[dict[str, tuple[Any, ...]]] = {
        "use_bias": (False,),
        "moe_gate": ("topk",),
        "moe_norm_min": (1e-12,),
        "moe_use_aux_free": (True,),
    }

    def make_mlp(self, config: ModelConfig, index: int, bias: bool) -> nn.Module:
        first = config.count("moe_layer_start_index")
        last = config.size("moe_layer_end_index", -1, low=-1)
        last = config.num_layers if last == -1 else last
        if not first <= index <= last or (index + 1) % config.size("moe_layer_interval", 1):
            return GatedMLP(config)
        size = config.size("moe_intermediate_size")
        sparse = sparse_mlp(
            config,
            size,
            renormalize=True,
            epsilon=1e-12,
            choice_bias=True,
            bias_index=0,
            wide=True,
        )
        shared_size = size * config.count("moe_num_shared_experts")
        return with_shared(sparse, config, shared_size)
