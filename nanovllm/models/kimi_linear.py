"""The Kimi-Linear family: Kimi Delta Attention, and latent attention without positions."""

from typing import Any, ClassVar

from nanovllm.errors import CheckpointError
from nanovllm.layers.gated_delta import DeltaSizes, KimiDeltaAttention
from nanovllm.models.config_fields import config_size
from nanovllm.models.decoder import DecoderLayer
from nanovllm.models.deepseek import DeepseekV3ForCausalLM
from nanovllm.models.expert_parts import DEEPSEEK_NAMES
from nanovllm.models.hybrid_parts import MAX_TAPS, check_mixed
from nanovllm.models.mla_parts import LatentAttention
from nanovllm.models.model_config import ModelConfig
from nanovllm.options.validation import shown

KIMI_NAMES = {
    "self_attn.f.": "self_attn.forget_gate.",
    "self_attn.f_proj.": "self_attn.forget_gate.f_proj.",
    "self_attn.g.": "self_attn.",
    "self_attn.norm.": "self_attn.o_norm.",
    "self_attn.out_proj.": "self_attn.o_proj.",
    **DEEPSEEK_NAMES,
}
"""transformers' names for the modules of a layer with `KimiDeltaAttention`, and of experts.
Published checkpoints have others, see `published_names` of the families."""
KIMI_ALIASES = {
    "head_dim": "qk_rope_head_dim",
    "max_position_embeddings": "model_max_length",
    "norm_topk_prob": "moe_renormalize",
    "n_group": "num_expert_group",
    "num_experts_per_tok": "num_experts_per_token",
    "n_shared_experts": "num_shared_experts",
}
"""The names of common fields in both families."""
TYPES = ("linear_attention", "full_attention")
"""Of layers: with Kimi Delta Attention and with latent attention."""
_LINEAR = {
    "linear_num_heads": "num_heads",
    "linear_head_dim": "head_dim",
    "linear_conv_kernel_dim": "short_conv_kernel_size",
}
"""The names of fields in linear_attn_config."""
_MAX_HEADS = 2**12
_MAX_DIM = 2**10


def kimi_delta(config: ModelConfig, fields: dict[str, Any], **options: Any) -> KimiDeltaAttention:
    """Return the Kimi Delta Attention of a layer."""
    heads = config_size(fields, "linear_num_heads", high=_MAX_HEADS)
    size = config_size(fields, "linear_head_dim", high=_MAX_DIM)
    taps = config_size(fields, "linear_conv_kernel_dim", high=MAX_TAPS, low=2)
    sizes = DeltaSizes(config.hidden_size, heads, heads, size, size, taps)
    return KimiDeltaAttention(sizes, config.rms_norm_eps, **options)


def linear_fields(config: ModelConfig) -> dict[str, Any]:
    """Return the config's fields, with those of linear_attn_config under transformers' names."""
    linear = _linear_attn_config(config)
    given = {own: linear[name] for own, name in _LINEAR.items() if name in linear}
    return config.fields | given


def layer_types_of_lists(config: ModelConfig) -> list[str]:
    """Return each layer's type: that of layer_types or, without it, by two lists of numbers, which
    are counted from 1.
    """
    if config.fields.get("layer_types") is not None:
        return check_mixed(config.layer_types_of(TYPES, []))
    linear = _linear_attn_config(config)
    types: dict[int, str] = {}
    lists = [linear.get(key) for key in ("kda_layers", "full_attn_layers")]
    for name, numbers in zip(TYPES, lists, strict=True):
        if isinstance(numbers, list) and {*map(type, numbers)} <= {int}:
            types |= {number: name for number in numbers if number not in types}
    if sorted(types) != list(range(1, config.num_layers + 1)):
        raise CheckpointError(
            "config.json: kda_layers and full_attn_layers of linear_attn_config must have the "
            f"numbers from 1 to num_hidden_layers {config.num_layers}, are {shown(lists)}"
        )
    return check_mixed([types[number] for number in sorted(types)])


def _linear_attn_config(config: ModelConfig) -> dict[str, Any]:
    found = config.fields.get("linear_attn_config")
    if found is not None and not isinstance(found, dict):
        raise CheckpointError(
            f"config.json: linear_attn_config must be an object, is {shown(found)}"
        )
    return found or {}


class KimiLinearForCausalLM(DeepseekV3ForCausalLM):
    """Kimi-Linear-48B-A3B: three of four layers have Kimi Delta Attention, which keeps a state; the
    fourth has latent attention without positions; experts, and one that all tokens share.
    """

    names: ClassVar[dict[str, str]] = KIMI_NAMES
    aliases: ClassVar[dict[str, str]] = KIMI_ALIASES
    defaults: ClassVar[dict[str, Any]] = {"first_k_dense_replace": 1}
    ignores = frozenset({"rope_theta", "rope_scaling", "rope_parameters", "rope_interleave"})
    reads = frozenset({"layer_types", "num_experts", "num_local_experts"})
    only: ClassVar[dict[str, tuple[Any, ...]]] = {
        "mla_use_nope": (True,),
        "moe_layer_freq": (1,),
        "moe_router_activation_func": ("sigmoid",),
    }

    def make_layer(self, config: ModelConfig, index: int) -> DecoderLayer:
        mlp = self.make_mlp(config, index)
        if layer_types_of_lists(config)[index] == "linear_attention":
            sizes = linear_fields(config)
            mixer = kimi_delta(config, sizes, low_rank=True, wide_log=True)
            return DecoderLayer(config, mixer, mlp)
        rotary_emb = self.rotary_emb(None, config.head_dim)
        bias = config.flag("attention_bias")
        return DecoderLayer(config, LatentAttention(config, rotary_emb, bias=bias), mlp)

    def published_names(self, name: str) -> tuple[str, ...]:
        published = name.replace("forget_gate.", "")
        return published, published.replace(".mlp.", ".block_sparse_moe.")
