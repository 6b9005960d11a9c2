"""The Bamba family: most layers have Mamba-2, the others have attention."""

from typing import ClassVar

from nanovllm.models.decoder import DecoderForCausalLM, DecoderLayer, GatedMLP, SelfAttention
from nanovllm.models.hybrid_parts import MAMBA_NAMES, check_mixed, mamba_mixer
from nanovllm.models.model_config import ModelConfig
from nanovllm.models.parts import attention_biases


class BambaForCausalLM(DecoderForCausalLM):
    """Bamba 9B: most layers have Mamba-2, which keeps a state; the others have attention that
    rotates half of each head.
    """

    names: ClassVar[dict[str, str]] = {
        **MAMBA_NAMES,
        "post_attention_layernorm.": "pre_ff_layernorm.",
        "mlp.": "feed_forward.",
        "model.norm.": "model.final_layernorm.",
    }
    ignores = frozenset({"partial_rotary_factor"})  # but not in rope_parameters
    reads = frozenset({"partial_rotary_factor"})

    def make_layer(self, config: ModelConfig, index: int) -> DecoderLayer:
        mlp = GatedMLP(config, bias=config.flag("mlp_bias"))
        attending = config.numbers("attn_layer_indices")
        types = ["full_attention" if i in attending else "mamba" for i in range(config.num_layers)]
        if check_mixed(types, "attn_layer_indices")[index] == "mamba":
            inner_size = config.size("mamba_expand") * config.hidden_size
            return DecoderLayer(config, mamba_mixer(config, inner_size), mlp)
        rotary_emb = self.rotary_emb(config.rope, config.head_dim)
        return DecoderLayer(
            config, SelfAttention(config, rotary_emb, **attention_biases(config)), mlp
        )
