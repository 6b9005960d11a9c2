"""Mixture-of-experts parts in Qwen's style, built from a config.json."""

import dataclasses
from collections.abc import Collection
from typing import Any

from torch import nn

from nanovllm.errors import CheckpointError
from nanovllm.kernels.torch_experts import Groups
from nanovllm.layers.experts import (
    MAX_EXPERTS,
    PER_EXPERT,
    Experts,
    Router,
    SharedExpertMLP,
    SparseMLP,
    StackedLinear,
    StoredExperts,
)
from nanovllm.models.decoder import GatedMLP
from nanovllm.models.model_config import ModelConfig
from nanovllm.options.validation import shown

BY_SIGMOID: dict[str, Any] = {
    "sigmoid": True,
    "choice_bias": True,
    "renormalize": True,
    "epsilon": 1e-20,
}
"""Options of `sparse_mlp` where experts are chosen by their sigmoids plus a bias."""
_TOGETHER = StoredExperts(linears=None)
NUMBERED = StoredExperts(linears=("w1", "w3", "w2"))


def is_dense(config: ModelConfig, index: int) -> bool:
    """Return whether layer `index` has an MLP in place of experts.

    Layers in `mlp_only_layers` have one, and so have those whose number, counted from 1, is not a
    multiple of `decoder_sparse_step`.
    """
    return index in config.numbers("mlp_only_layers") or bool(
        (index + 1) % config.size("decoder_sparse_step", 1)
    )


def is_typed_dense(config: ModelConfig, index: int) -> bool:
    """Return whether layer `index` has an MLP by mlp_layer_types or, without it, because it is one
    of the first_k_dense_replace first.
    """
    types = config.fields.get("mlp_layer_types")
    if types is None:
        return index < config.count("first_k_dense_replace")
    kinds = ("dense", "sparse")
    layers = config.num_layers
    if not isinstance(types, list) or len(types) != layers or not all(t in kinds for t in types):
        raise CheckpointError(
            f"config.json: mlp_layer_types must have {' or '.join(kinds)} for each of {layers} "
            f"layers, is {shown(types)}"
        )
    return bool(types[index] == "dense")


def sparse_mlp(
    config: ModelConfig,
    size: int,
    *,
    bias: bool = False,
    gated: bool = True,
    activation: str = "silu",
    stored: StoredExperts = PER_EXPERT,
    **choice: Any,
) -> SparseMLP:
    """Return a router and its experts.

    Args:
        size: intermediate size of an expert.
        bias: whether the linears of router and experts have one.
        gated, activation, stored: see `Experts`.
        choice: see `Router`.
    """
    num_experts = num_experts_of(config)
    key = "moe_k" if "moe_k" in config.fields else "num_experts_per_tok"
    top_k = config.size(key, high=num_experts)
    router = Router(config.hidden_size, num_experts, top_k, bias=bias, **choice)
    experts = Experts(
        num_experts,
        config.hidden_size,
        size,
        gated=gated,
        activation=activation,
        bias=bias,
        stored=stored,
    )
    return SparseMLP(router, experts)


def with_shared(
    sparse: SparseMLP, config: ModelConfig, size: int, *, gated: bool = False, fused: bool = False
) -> SparseMLP:
    """Return `sparse` plus an expert of `size` that all tokens share; 0: `sparse` alone."""
    if not size:
        return sparse
    shared = GatedMLP(dataclasses.replace(config, intermediate_size=size), fused=fused)
    return SharedExpertMLP(sparse.gate, sparse.experts, shared, gated=gated)


def shared_expert_mlp(config: ModelConfig, *, renormalize: bool) -> SparseMLP:
    """Return a router and its experts, plus one gated expert that all tokens share."""
    sparse = sparse_mlp(config, config.size("moe_intermediate_size"), renormalize=renormalize)
    return with_shared(sparse, config, config.size("shared_expert_intermediate_size"), gated=True)


def deepseek_mlp(config: ModelConfig, **choice: Any) -> SparseMLP:
    """Return `deepseek_experts`, plus experts that all tokens share, as one of their size."""
    size = config.size("moe_intermediate_size")
    return with_shared(
        deepseek_experts(config, **choice), config, size * config.count("n_shared_experts")
    )


def deepseek_experts(config: ModelConfig, **choice: Any) -> SparseMLP:
    """Return a router in float32 and its experts, with DeepSeek-V3's fields and arithmetic.

    Experts are chosen by their sigmoids plus a bias, in groups if n_group is above 1. The names of
    the checkpoint are those of `DEEPSEEK_NAMES`.
    """
    options = BY_SIGMOID | {
        "renormalize": config.flag("norm_topk_prob", default=True),
        "factor": config.number("routed_scaling_factor", 1.0),
        "wide": True,
        "groups": expert_groups(config),
    }
    return sparse_mlp(config, config.size("moe_intermediate_size"), **options | choice)


DEEPSEEK_NAMES = {
    "mlp.expert_bias": "mlp.gate.e_score_correction_bias",
    "mlp.shared_expert.": "mlp.shared_experts.",
}
"""Checkpoint names for the modules of `deepseek_mlp`."""


def expert_groups(config: ModelConfig, best: int = 2) -> Groups | None:
    """Return the groups of experts of n_group and topk_group; None: there is one.

    Args:
        best: see `Groups`.

    Raises:
        CheckpointError: the groups do not divide the experts, or are too small.
    """
    number = config.size("n_group", 1, high=MAX_EXPERTS)
    kept = config.size("topk_group", 1)
    if number == kept == 1:
        return None
    num_experts = num_experts_of(config)
    top_k = config.size("num_experts_per_tok")
    size, rest = divmod(num_experts, number)
    if rest or size < best or kept > number or size * kept < top_k:
        names = [config.names[key] for key in ("n_group", "topk_group", "num_experts_per_tok")]
        raise CheckpointError(
            f"config.json: {names[0]} {number}, {names[1]} {kept} and {names[2]} {top_k} do not "
            f"fit {num_experts} experts"
        )
    return Groups(number, kept, best)


def num_experts_of(config: ModelConfig) -> int:
    """Return the number of experts, whose field has a name of the family's."""
    names = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
    given = [name for name in names if name in config.fields] or ["num_experts"]
    key = next((name for name in given if config.fields.get(name)), given[0])
    return config.size(key, high=MAX_EXPERTS)


def expect_stored(model: nn.Module, known: Collection[str]) -> None:
    """Make the experts of `model` load the checkpoint's form: separate linears for each expert,
    under one of two sets of names, or tensors of all experts.
    """
    separate = [name for name in known if ".experts.0." in name]
    form = PER_EXPERT if separate else _TOGETHER
    if any(".w1." in name for name in separate):
        form = NUMBERED
    for module in model.modules():
        if isinstance(module, StackedLinear):
            module.stored_as = form
