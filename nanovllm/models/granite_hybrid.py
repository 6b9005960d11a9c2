"""The Granite 4 family: Granite, with or without RoPE, Mamba-2 and experts."""

import dataclasses
from typing import ClassVar

from torch import nn

from nanovllm.errors import UnsupportedModelError
from nanovllm.models.decoder import GatedMLP
from nanovllm.models.granite_moe import GraniteMoeForCausalLM
from nanovllm.models.hybrid_parts import check_mixed
from nanovllm.models.mamba_parts import MAMBA_NAMES, mamba_mixer
from nanovllm.models.model_config import ModelConfig
from nanovllm.options.validation import shown


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
        kind = config.fields.get("position_embedding_type")
        if kind not in ("rope", "nope", None):
            raise UnsupportedModelError(
                f"config.json: position_embedding_type {shown(kind)} is not supported (rope, nope)"
            )
        return self.make_attention(config, config.rope if kind == "rope" else None)

    def make_mlp(self, config: ModelConfig) -> nn.Module:
        size = config.size("shared_intermediate_size")
        if config.count("num_local_experts"):
            return super().make_mlp(config)
        return GatedMLP(dataclasses.replace(config, intermediate_size=size), fused=True)
