"""The Granite families: Llama with multipliers, with experts or Mamba-2 layers in some."""

import dataclasses
from collections.abc import Collection
from typing import ClassVar

from torch import nn

from nanovllm.attention.spec import AttentionOptions
from nanovllm.layers.experts import StoredExperts
from nanovllm.layers.linear import MergedColumnParallelLinear
from nanovllm.layers.rotary_embedding import RopeConfig
from nanovllm.models.decoder import DecoderLayer, GatedMLP, SelfAttention
from nanovllm.models.expert_parts import expect_stored, sparse_mlp, with_shared
from nanovllm.models.hybrid_parts import MAMBA_NAMES, check_mixed, mamba_mixer
from nanovllm.models.model_config import ModelConfig
from nanovllm.models.parts import MultipliedForCausalLM, Multipliers, attention_biases


class GraniteForCausalLM(MultipliedForCausalLM):
    """Granite 3 and 4 (dense): Llama with factors on embedding, scores, residual and logits."""

    reads = frozenset(
        {"embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling"}
    )

    def read_multipliers(self, config: ModelConfig) -> Multipliers:
        names = ("embedding_multiplier", "residual_multiplier", "logits_scaling")
        return Multipliers(*(config.number(name, 1.0) for name in names))

    def make_layer(self, config: ModelConfig, index: int) -> DecoderLayer:
        mixer = self.make_mixer(config, index)
        return DecoderLayer(config, mixer, self.make_mlp(config), **self.norm)

    def make_mixer(self, config: ModelConfig, index: int) -> nn.Module:
        """Return the attention of layer `index`, or what it has in place of it."""
        return self.make_attention(config, config.rope)

    def make_mlp(self, config: ModelConfig) -> nn.Module:
        """Return the MLP of a layer, or its experts."""
        return GatedMLP(config, bias=config.flag("mlp_bias"))

    def make_attention(self, config: ModelConfig, rope: RopeConfig | None) -> SelfAttention:
        """Return the attention of a layer; None: without RoPE."""
        return SelfAttention(
            config,
            self.rotary_emb(rope, config.head_dim),
            options=AttentionOptions(scale=config.number("attention_multiplier", 1.0)),
            **attention_biases(config),
        )


class GraniteMoeForCausalLM(GraniteForCausalLM):
    """Granite 3 1B-A400M and 3B-A800M: Granite with experts in place of the MLP."""

    names: ClassVar[dict[str, str]] = {
        "mlp.gate.": "block_sparse_moe.router.layer.",
        "mlp.experts.gate_up_proj": "block_sparse_moe.input_linear.weight",
        "mlp.experts.down_proj": "block_sparse_moe.output_linear.weight",
        "mlp.shared_expert.gate_up_proj.": "shared_mlp.input_linear.",
        "mlp.shared_expert.down_proj.": "shared_mlp.output_linear.",
        "mlp.gate_up_proj.": "shared_mlp.input_linear.",
        "mlp.down_proj.": "shared_mlp.output_linear.",
    }
    reads = GraniteForCausalLM.reads | {"num_local_experts"}
    ignores = frozenset({"shared_intermediate_size"})

    def make_mlp(self, config: ModelConfig) -> nn.Module:
        stored = StoredExperts(linears=None)
        sparse = sparse_mlp(config, config.intermediate_size, stored=stored, renormalize=True)
        size = config.count("shared_intermediate_size")
        return with_shared(sparse, config, size, fused=True)

    def expect(self, known: Collection[str]) -> None:
        """Load the form of the checkpoint: gates and ups are together, but not in GGUF files."""
        expect_stored(self, known)
        for module in self.modules():
            if isinstance(module, MergedColumnParallelLinear):
                module.fused = any("shared_mlp.input_linear." in name for name in known)


class GraniteMoeSharedForCausalLM(GraniteMoeForCausalLM):
    """Granite with experts, and one that all tokens share."""

    ignores = frozenset()


class GraniteMoeHybridForCausalLM(GraniteMoeForCausalLM):
    """Granite 4 350M, 1B and 3B, H-350M to H-Small: Granite, with or without RoPE; nine of ten
    layers of the H models are Mamba-2, which keeps a state; some have experts next to the MLP.
    """

    names: ClassVar[dict[str, str]] = {**GraniteMoeForCausalLM.names, **MAMBA_NAMES}
    reads = GraniteMoeForCausalLM.reads | {"layer_types"}
    ignores = frozenset()

    def make_mixer(self, config: ModelConfig, index: int) -> nn.Module:
        kinds = "linear_attention", "full_attention"
        types = check_mixed(config.layer_types_of(kinds, ["linear_attention"] * config.num_layers))
        if types[index] == "linear_attention":
            return mamba_mixer(config, config.size("mamba_expand") * config.hidden_size)
        config.only("position_embedding_type", "rope", "nope")
        rotates = config.fields.get("position_embedding_type") == "rope"
        return self.make_attention(config, config.rope if rotates else None)

    def make_mlp(self, config: ModelConfig) -> nn.Module:
        size = config.size("shared_intermediate_size")
        if config.count("num_local_experts"):
            return super().make_mlp(config)
        return GatedMLP(dataclasses.replace(config, intermediate_size=size), fused=True)
