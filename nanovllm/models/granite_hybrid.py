"""The Granite 4 family: Granite, with or without RoPE and experts."""

import dataclasses
from typing import Any, ClassVar

from torch import nn

from nanovllm.errors import UnsupportedModelError
from nanovllm.models.decoder import GatedMLP, SelfAttention
from nanovllm.models.granite_moe import GraniteMoeForCausalLM
from nanovllm.models.hybrid_parts import check_mixed
from nanovllm.models.model_config import ModelConfig
from nanovllm.options.validation import shown


class GraniteMoeHybridForCausalLM(GraniteMoeForCausalLM):
    """Granite 4 350M, 1B and 3B: Granite, with or without RoPE, and with experts if the config says
    so, next to an MLP for all tokens.
    """

    defaults: ClassVar[dict[str, Any]] = {
        **GraniteMoeForCausalLM.defaults,
        "shared_intermediate_size": 1024,
    }
    reads = GraniteMoeForCausalLM.reads | {"layer_types"}
    ignores = frozenset()

    def make_mixer(self, config: ModelConfig, index: int) -> SelfAttention:
        types = config.layer_types_of(("full_attention",), ["linear_attention"] * config.num_layers)
        check_mixed(types)
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
        return GatedMLP(dataclasses.replace(config, intermediate_size=size))
