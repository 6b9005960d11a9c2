"""What the architectures of llama.cpp have of their own in a GGUF file: names of tensors, the order
and the offset of their numbers, and settings. A new one is one entry of FAMILIES.

Reads metadata, no weight. Imports no torch.
"""

from collections.abc import Callable

from nanovllm.checkpoint.gguf_family import Fields, GgufFamily
from nanovllm.checkpoint.gguf_gemma4 import GEMMA4_KEYS, gemma4_fields
from nanovllm.checkpoint.gguf_lfm2 import (
    LFM2_MODULES,
    LFM2_MOE_MODULES,
    LFM2_READINGS,
    LFM2_SIZES,
    LFM2_TENSORS,
    lfm2_fields,
    lfm2_moe_fields,
)
from nanovllm.checkpoint.gguf_metadata import MAX_SIZE, Metadata
from nanovllm.checkpoint.gguf_qwen35 import (
    QWEN35_DRAFT_TENSORS,
    QWEN35_KEYS,
    QWEN35_MODULES,
    QWEN35_MOE_MODULES,
    QWEN35_SIZES,
    QWEN35_TENSORS,
    qwen35_fields,
    qwen35_readings,
)
from nanovllm.errors import UnsupportedModelError
from nanovllm.options.validation import check_int, shown

_WINDOW_KEYS = frozenset({"attention.sliding_window", "attention.sliding_window_pattern"})
_EXPERT_SIZES = {
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}
_SANDWICH = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_EXPERTS = {
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
}
_SOFTCAP = {"final_logit_softcapping": "final_logit_softcapping"}


def _windows(metadata: Metadata, config: Fields, interval: int, default: int = 0) -> Fields:
    """Return the window, null for none, and the type of each layer.

    Args:
        interval: without a pattern, every so many layers have full attention.
        default: the window, if the file has none.
    """
    key, num_layers = "attention.sliding_window", config["num_hidden_layers"]
    window = metadata.setting(key, check_int, 0, MAX_SIZE, default=default)
    has_window = metadata.listed(f"{key}_pattern", num_layers, bool)
    if has_window is None:
        interval = metadata.setting(f"{key}_pattern", check_int, 0, MAX_SIZE, default=interval)
        layers = range(1, num_layers + 1)
        has_window = [not interval or number % interval != 0 for number in layers]
    types = [
        "sliding_attention" if window and slides else "full_attention" for slides in has_window
    ]
    return {"sliding_window": window or None, "layer_types": types}


def _theta_of_windows(metadata: Metadata, config: Fields, default: float) -> Fields:
    """Return rotary settings by type of layer: those with a window have no scaling."""
    theta = metadata.number("rope.freq_base_swa", default)
    return {
        "rope_parameters": {
            "full_attention": config["rope_parameters"],
            "sliding_attention": {"rope_theta": theta},
        }
    }


def _gemma(num_layers: int) -> Callable[[Metadata, Fields], Fields]:
    """Return the fields of Gemma 2 or 3. The largest model, of `num_layers`, scales differently:
    no key says so.
    """

    def fields(metadata: Metadata, config: Fields) -> Fields:
        scalar = config["head_dim"]
        if config["num_hidden_layers"] == num_layers:
            scalar = config["hidden_size"] // config["num_attention_heads"]
        own = {"query_pre_attn_scalar": scalar}
        if metadata.architecture == "gemma2":
            return own | _windows(metadata, config, 2, default=4096)
        own |= _windows(metadata, config, 6)
        return own | _theta_of_windows(metadata, config, 10_000.0)

    return fields


def _mistral3(metadata: Metadata, config: Fields) -> Fields:
    """The queries' factor: llama.cpp has it grow at multiples of the original context."""
    if not metadata.has("attention.temperature_scale"):
        return {}
    rope: Fields = config["rope_parameters"]
    original = metadata.size("rope.scaling.original_context_length")
    length = metadata.size("attention.temperature_length", original)
    if length != original or rope.get("rope_type") != "yarn":
        raise UnsupportedModelError(
            f"{metadata.file}: mistral3.attention.temperature_length {length} is not supported: "
            f"it must be the original context of yarn scaling, {original}"
        )
    beta = metadata.number("attention.temperature_scale")
    return {"rope_parameters": {**rope, "llama_4_scaling_beta": beta}}


def _phi3(metadata: Metadata, config: Fields) -> Fields:
    window = metadata.setting("attention.sliding_window", check_int, 0, MAX_SIZE, default=0)
    return {"sliding_window": window or None}


def _olmo2(metadata: Metadata, config: Fields) -> Fields:
    """Olmo 3 is an Olmo 2 with windows."""
    windows = _windows(metadata, config, 4)
    if windows["sliding_window"] is None:
        return {}
    theta = config["rope_parameters"]["rope_theta"]
    own = {"architectures": ["Olmo3ForCausalLM"], **windows}
    return own | _theta_of_windows(metadata, config, theta)


def _qwen3moe(metadata: Metadata, config: Fields) -> Fields:
    """llama.cpp always normalises the weights of a token's experts."""
    size = max(1, config["intermediate_size"] // config["num_experts_per_tok"])
    return {
        "moe_intermediate_size": metadata.size("expert_feed_forward_length", size),
        "norm_topk_prob": True,
    }


def _gpt_oss(metadata: Metadata, config: Fields) -> Fields:
    """The bounds of yarn's ramp are not rounded, as in the published config.json."""
    return {
        **_windows(metadata, config, 2),
        "rope_parameters": {**config["rope_parameters"], "truncate": False},
        "split_experts": True,
    }


FAMILIES: dict[str, GgufFamily] = {
    "ernie4_5": GgufFamily(
        "Ernie4_5ForCausalLM",
        fields=lambda metadata, config: {"use_bias": config["attention_bias"]},
    ),
    "exaone4": GgufFamily(
        "Exaone4ForCausalLM",
        modules=_SANDWICH,
        keys=_WINDOW_KEYS,
        fields=lambda metadata, config: _windows(metadata, config, 4),
    ),
    "gemma2": GgufFamily(
        "Gemma2ForCausalLM",
        modules=_SANDWICH,
        norm_offset=-1.0,
        numbers={**_SOFTCAP, "attn_logit_softcapping": "attn_logit_softcapping"},
        keys=_WINDOW_KEYS,
        fields=_gemma(46),
    ),
    "gemma3": GgufFamily(
        "Gemma3ForCausalLM",
        modules=_SANDWICH,
        norm_offset=-1.0,
        numbers=_SOFTCAP,
        keys=_WINDOW_KEYS | {"rope.freq_base_swa"},
        fields=_gemma(62),
    ),
    "gemma4": GgufFamily(
        "Gemma4ForCausalLM",
        modules={
            **_SANDWICH,
            "inp_gate": "per_layer_input_gate",
            "proj": "per_layer_projection",
            "post_norm": "post_per_layer_input_norm",
        },
        tensors={
            "layer_output_scale.weight": "layer_scalar",
            "per_layer_token_embd.weight": "model.embed_tokens_per_layer.weight",
            "per_layer_model_proj.weight": "model.per_layer_model_projection.weight",
            "per_layer_proj_norm.weight": "model.per_layer_projection_norm.weight",
        },
        numbers=_SOFTCAP,
        keys=GEMMA4_KEYS,
        per_layer=frozenset({"attention.head_count_kv", "feed_forward_length"}),
        fields=gemma4_fields,
    ),
    "gpt-oss": GgufFamily(
        "GptOssForCausalLM",
        modules={
            **_EXPERTS,
            "post_attention_norm": "post_attention_layernorm",
            "ffn_gate_inp": "mlp.router",
        },
        tensors={"attn_sinks.weight": "self_attn.sinks"},
        sizes={
            "expert_count": "num_local_experts",
            "expert_used_count": "num_experts_per_tok",
            "expert_feed_forward_length": "intermediate_size",
        },
        keys=_WINDOW_KEYS,
        fields=_gpt_oss,
    ),
    "granite": GgufFamily(
        "GraniteForCausalLM",
        permuted=True,
        numbers={
            "embedding_scale": "embedding_multiplier",
            "residual_scale": "residual_multiplier",
            "logit_scale": "logits_scaling",
        },
        keys=frozenset({"attention.scale"}),
        fields=lambda metadata, config: {
            "attention_multiplier": metadata.number("attention.scale", config["head_dim"] ** -0.5)
        },
        neutral={"rope.scaling.finetuned": True},  # False: no layer rotates
    ),
    "hunyuan-dense": GgufFamily(
        "HunYuanDenseV1ForCausalLM",
        modules={
            "attn_q_norm": "self_attn.query_layernorm",
            "attn_k_norm": "self_attn.key_layernorm",
        },
    ),
    "lfm2": GgufFamily(
        "Lfm2ForCausalLM",
        modules=LFM2_MODULES,
        tensors=LFM2_TENSORS,
        sizes=LFM2_SIZES,
        per_layer=frozenset({"attention.head_count_kv"}),
        fields=lfm2_fields,
        readings=lambda config: LFM2_READINGS,
    ),
    "lfm2moe": GgufFamily(
        "Lfm2MoeForCausalLM",
        modules={**LFM2_MODULES, **LFM2_MOE_MODULES},
        tensors=LFM2_TENSORS,
        sizes=LFM2_SIZES | _EXPERT_SIZES,
        keys=frozenset({"leading_dense_block_count"}),
        per_layer=frozenset({"attention.head_count_kv"}),
        fields=lfm2_moe_fields,
        readings=lambda config: LFM2_READINGS,
        neutral={"expert_gating_func": 2},  # a sigmoid
    ),
    "llama": GgufFamily("LlamaForCausalLM", permuted=True),
    "mistral3": GgufFamily(
        "Ministral3ForCausalLM",
        permuted=True,
        keys=frozenset({"attention.temperature_scale", "attention.temperature_length"}),
        fields=_mistral3,
    ),
    "olmo2": GgufFamily(
        "Olmo2ForCausalLM",
        modules=_SANDWICH,
        keys=_WINDOW_KEYS | {"rope.freq_base_swa"},
        fields=_olmo2,
    ),
    "phi3": GgufFamily(
        "Phi3ForCausalLM",
        modules={"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
        keys=frozenset({"attention.sliding_window"}),
        partial_rotation=True,
        fields=_phi3,
    ),
    "qwen2": GgufFamily("Qwen2ForCausalLM"),
    "qwen3": GgufFamily("Qwen3ForCausalLM"),
    "qwen35": GgufFamily(
        "Qwen3_5ForCausalLM",
        modules=QWEN35_MODULES,
        tensors=QWEN35_TENSORS,
        draft_tensors=QWEN35_DRAFT_TENSORS,
        sizes=QWEN35_SIZES,
        keys=QWEN35_KEYS,
        partial_rotation=True,
        fields=qwen35_fields,
        readings=qwen35_readings,
    ),
    "qwen35moe": GgufFamily(
        "Qwen3_5MoeForCausalLM",
        modules={**QWEN35_MODULES, **QWEN35_MOE_MODULES, **_EXPERTS},
        tensors=QWEN35_TENSORS,
        draft_tensors=QWEN35_DRAFT_TENSORS,
        sizes={
            **QWEN35_SIZES,
            **_EXPERT_SIZES,
            "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
        },
        keys=QWEN35_KEYS,
        partial_rotation=True,
        fields=qwen35_fields,
        readings=qwen35_readings,
        neutral={"expert_gating_func": 1},  # a softmax
    ),
    "qwen3moe": GgufFamily(
        "Qwen3MoeForCausalLM",
        modules={**_EXPERTS, "ffn_gate_inp": "mlp.gate"},
        sizes={
            "expert_count": "num_experts",
            "expert_used_count": "num_experts_per_tok",
        },
        keys=frozenset({"expert_feed_forward_length"}),
        fields=_qwen3moe,
        neutral={"expert_gating_func": 1},  # a softmax
    ),
    "seed_oss": GgufFamily(
        "SeedOssForCausalLM",
        modules={"post_attention_norm": "post_attention_layernorm"},
        fields=lambda metadata, config: {
            "attention_out_bias": "blk.0.attn_output.bias" in metadata.tensors
        },
    ),
    "smollm3": GgufFamily("SmolLM3ForCausalLM", permuted=True),
}
"""By `general.architecture`."""


def family_of(metadata: Metadata) -> GgufFamily:
    """Return the family of a file.

    Raises:
        UnsupportedModelError: there is none.
    """
    family = FAMILIES.get(metadata.architecture)
    if family is None:
        raise UnsupportedModelError(
            f"{metadata.file}: general.architecture {shown(metadata.architecture)} is not "
            f"supported ({', '.join(FAMILIES)})"
        )
    return family
