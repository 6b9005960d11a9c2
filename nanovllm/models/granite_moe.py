"""Granite with experts, whose checkpoints have names of their own for them."""

from collections.abc import Collection
from typing import ClassVar

from torch import nn

from nanovllm.layers.experts import StoredExperts
from nanovllm.layers.linear import MergedColumnParallelLinear
from nanovllm.models.expert_parts import expect_stored, sparse_mlp, with_shared
from nanovllm.models.granite import GraniteForCausalLM
from nanovllm.models.model_config import ModelConfig


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
