"""The Falcon-H1 family: attention and Mamba-2 side by side in each layer."""

from typing import ClassVar

from nanovllm.attention.spec import AttentionOptions
from nanovllm.models.decoder import DecoderLayer, SelfAttention
from nanovllm.models.falcon_h1_parts import ParallelMixer, ScaledMLP, factors
from nanovllm.models.mamba_parts import mamba_mixer
from nanovllm.models.model_config import ModelConfig
from nanovllm.models.parts import MultipliedForCausalLM, Multipliers, attention_biases


class FalconH1ForCausalLM(MultipliedForCausalLM):
    """Falcon-H1 0.5B to 34B: attention and Mamba-2, which keeps a state, side by side, and factors
    on what most parts read or return.
    """

    names: ClassVar[dict[str, str]] = {
        "self_attn.attention.": "self_attn.",
        "self_attn.mamba.": "mamba.",
        "post_attention_layernorm.": "pre_ff_layernorm.",
        "mlp.": "feed_forward.",
        "model.norm.": "model.final_layernorm.",
    }
    reads = frozenset({"embedding_multiplier"})

    def read_multipliers(self, config: ModelConfig) -> Multipliers:
        embedding, logits = (
            config.number(f"{name}_multiplier", 1.0) for name in ("embedding", "lm_head")
        )
        return Multipliers(embedding, 1.0, 1.0 / logits)

    def make_layer(self, config: ModelConfig, index: int) -> DecoderLayer:
        scale = config.number("key_multiplier", 1.0) * config.head_dim**-0.5
        attention = SelfAttention(
            config,
            self.rotary_emb(config.rope, config.head_dim),
            options=AttentionOptions(scale=scale),
            **attention_biases(config),
        )
        expanded = config.size("mamba_expand") * config.hidden_size
        mamba = mamba_mixer(
            config,
            config.count("mamba_d_ssm") or expanded,
            eps=config.rms_norm_eps if config.flag("mamba_rms_norm") else None,
            gate_first=not config.flag("mamba_norm_before_gate", default=True),
            output_bias=config.flag("projectors_bias"),
            factors=factors(config, "ssm_multipliers", 5),
        )
        return DecoderLayer(config, ParallelMixer(config, attention, mamba), ScaledMLP(config))
