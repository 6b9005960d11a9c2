"""Mixture-of-experts parts in Qwen's style, built from a config.json."""

import dataclasses
from collections.abc import Collection
from typing import Any

from torch import nn

from nanovllm.errors import CheckpointError
from nanovllm.layers.experts import (
    MAX_EXPERTS,
    PER_EXPERT,
    Experts,
    Router,
    SparseMLP,
    StackedLinear,
    StoredExperts,
)
from nanovllm.models.decoder import GatedMLP
from nanovllm.models.hybrid_parts import SharedExpertMLP
from nanovllm.models.model_config import ModelConfig
from nanovllm.options.validation import shown

_TOGETHER = StoredExperts(linears=None)


def is_dense(config: ModelConfig, index: int) -> bool:
    """Return whether layer `index` has an MLP in place of experts.

    Layers in `mlp_only_layers` have one, and so have those whose number, counted from 1, is not a
    multiple of `decoder_sparse_step`.
    """
    dense = config.fields.get("mlp_only_layers") or []
    if not isinstance(dense, list) or {*map(type, dense)} - {int}:
        raise CheckpointError(
            f"config.json: mlp_only_layers must be a list of numbers, is {shown(dense)}"
        )
    return index in dense or bool((index + 1) % config.size("decoder_sparse_step", 1))


def sparse_mlp(
    config: ModelConfig,
    size: int,
    *,
    bias: bool = False,
    activation: str = "silu",
    stored: StoredExperts = PER_EXPERT,
    **choice: Any,
) -> SparseMLP:
    """Return a router and its experts.

    Args:
        size: intermediate size of an expert.
        bias: whether the linears of router and experts have one.
        activation, stored: see `Experts`.
        choice: see `Router`.
    """
    # transformers 5 writes num_local_experts, transformers 4 wrote num_experts.
    key = "num_local_experts" if config.fields.get("num_local_experts") else "num_experts"
    num_experts = config.size(key, high=MAX_EXPERTS)
    top_k = config.size("num_experts_per_tok", 8, high=num_experts)
    router = Router(config.hidden_size, num_experts, top_k, bias=bias, **choice)
    experts = Experts(
        num_experts, config.hidden_size, size, activation=activation, bias=bias, stored=stored
    )
    return SparseMLP(router, experts)


def shared_expert_mlp(config: ModelConfig, *, renormalize: bool) -> SharedExpertMLP:
    """Return a router and its experts, plus one expert that all tokens share."""
    sparse = sparse_mlp(config, config.size("moe_intermediate_size"), renormalize=renormalize)
    size = config.size("shared_expert_intermediate_size")
    shared = GatedMLP(dataclasses.replace(config, intermediate_size=size))
    return SharedExpertMLP(sparse.gate, sparse.experts, shared, config.hidden_size)


def expect_stored(model: nn.Module, known: Collection[str]) -> None:
    """Make the experts of `model` load the checkpoint's form: separate linears for each expert, or
    tensors of all experts.

    Args:
        known: the names of the checkpoint's tensors.
    """
    form = PER_EXPERT if any(".experts.0." in name for name in known) else _TOGETHER
    for module in model.modules():
        if isinstance(module, StackedLinear):
            module.stored_as = form
