"""The Granite 4 family: Granite whose layers may have no rope, a state, or experts."""

import dataclasses
from typing import Any, ClassVar

from torch import nn

from nanovllm.errors import UnsupportedModelError
from nanovllm.models.decoder import DecoderLayer, GatedMLP
from nanovllm.models.granite import GraniteForCausalLM
from nanovllm.models.hybrid_parts import check_mixed
from nanovllm.models.model_config import ModelConfig
from nanovllm.options.validation import shown


class GraniteMoeHybridForCausalLM(GraniteForCausalLM):
    """Granite 4 350M, 1B and 3B: Granite, with or without RoPE."""

    names: ClassVar[dict[str, str]] = {
        "mlp.gate_up_proj.": "shared_mlp.input_linear.",
        "mlp.down_proj.": "shared_mlp.output_linear.",
    }
    defaults: ClassVar[dict[str, Any]] = {"num_local_experts": 8, "shared_intermediate_size": 1024}
    reads = GraniteForCausalLM.reads | {"layer_types"}

    def make_layer(self, config: ModelConfig, index: int) -> DecoderLayer:
        types = config.layer_types_of(("full_attention",), ["linear_attention"] * config.num_layers)
        check_mixed(types)
        attention = self.make_attention(config, config.rope if _rotates(config) else None)
        return DecoderLayer(config, attention, self.make_mlp(config), **self.norm)

    def make_mlp(self, config: ModelConfig) -> nn.Module:
        """Return the MLP of a layer."""
        if config.count("num_local_experts"):
            raise UnsupportedModelError(
                f"config.json: num_local_experts {config.count('num_local_experts')} is not "
                "supported (only 0)"
            )
        size = config.size("shared_intermediate_size")
        return GatedMLP(dataclasses.replace(config, intermediate_size=size), fused=True)


def _rotates(config: ModelConfig) -> bool:
    """Return whether queries and keys are rotated."""
    kind = config.fields.get("position_embedding_type")
    if kind not in ("rope", "nope", None):
        raise UnsupportedModelError(
            f"config.json: position_embedding_type {shown(kind)} is not supported (rope, nope)"
        )
    return bool(kind == "rope")
