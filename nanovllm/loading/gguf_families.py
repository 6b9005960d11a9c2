"""What is specific to llama.cpp's architectures in a GGUF file: names of tensors, the order
and the offset of their numbers, and settings. A new one is one entry of FAMILIES.

Reads metadata, no weight. Imports no torch.
"""

from collections.abc import Callable

from nanovllm.errors import UnsupportedModelError
from nanovllm.loading.gguf_family import (
    LOCAL_EXPERT_SIZES,
    SANDWICH,
    SOFTCAP,
    Fields,
    GgufFamily,
    rope_sections,
    theta_of_windows,
    windows,
)
from nanovllm.loading.gguf_header import MAX_SIZE, GGUFMetadata
from nanovllm.loading.gguf_routed import ROUTED
from nanovllm.loading.gguf_states import STATES
from nanovllm.options.validation import check_int, shown


def _gemma4(metadata: GGUFMetadata, config: Fields) -> Fields:
    """Return the fields of Gemma 4's config.json beyond the common ones.

    In the file the plain sizes of a head are those of the layers with full attention.
    """
    num_layers = config["num_hidden_layers"]
    tensors = metadata.tensors
    slides = metadata.listed_for_layers("attention.sliding_window_pattern", num_layers, bool)
    head_dim = metadata.size("attention.key_length_swa")
    for key in ("attention.value_length_swa", "rope.dimension_count_swa"):
        if (found := metadata.size(key, head_dim)) != head_dim:
            raise metadata.unsupported(key, found, f"the head size, {head_dim}")
    full = [index for index in range(num_layers) if not slides[index]]
    same_values = bool(full) and f"blk.{full[0]}.attn_v.weight" not in tensors
    num_shared = metadata.setting("attention.shared_kv_layers", check_int, 0, num_layers, default=0)
    extra = metadata.size("embedding_length_per_layer_input", 0)
    embedding = tensors.get("per_layer_token_embd.weight")
    heads = (
        metadata.listed("attention.head_count_kv", num_layers, int)
        or [config["num_key_value_heads"]] * num_layers
    )
    by_type = dict(zip(slides, heads, strict=True))
    if any(by_type[slide] != count for slide, count in zip(slides, heads, strict=True)):
        rule = "equally many in all layers of one type"
        raise metadata.unsupported("attention.head_count_kv", heads, rule)
    return {
        "head_dim": head_dim,
        "global_head_dim": config["head_dim"],
        "num_key_value_heads": by_type.get(True, heads[0]),
        "num_global_key_value_heads": by_type.get(False, heads[0]),
        "attention_k_eq_v": same_values,
        "sliding_window": metadata.size("attention.sliding_window"),
        "layer_types": ["sliding_attention" if s else "full_attention" for s in slides],
        "num_kv_shared_layers": num_shared,
        "hidden_size_per_layer_input": extra,
        "vocab_size_per_layer_input": embedding.shape[0] if embedding else 1,
        "pad_token_id": metadata.values.get("tokenizer.ggml.padding_token_id", 0),
        **_gemma4_mlp(metadata, num_layers, num_shared),
        "rope_parameters": {
            "full_attention": _gemma4_rope(metadata, config),
            "sliding_attention": {"rope_theta": metadata.number("rope.freq_base_swa", 10_000.0)},
        },
    }


def _gemma4_mlp(metadata: GGUFMetadata, num_layers: int, num_shared: int) -> Fields:
    sizes = metadata.listed("feed_forward_length", num_layers, int)
    if sizes is None:
        return {"use_double_wide_mlp": False}
    size = sizes[0]
    doubled = sizes[-1] == 2 * sizes[0]
    expected = [size] * (num_layers - num_shared) + [size * (1 + doubled)] * num_shared
    if sizes != expected or not 1 <= size <= MAX_SIZE:
        rule = "the same in all layers, or twice that in those that share keys and values"
        raise metadata.unsupported("feed_forward_length", sizes, rule)
    return {"intermediate_size": size, "use_double_wide_mlp": doubled}


def _gemma4_rope(metadata: GGUFMetadata, config: Fields) -> Fields:
    """Return the rotary settings of full attention: the file divides by 1 what rotates, and by an
    astronomic number what does not.
    """
    size = config["head_dim"] // 2
    rope = config["rope_parameters"]
    factors = rope.get("factors", [])
    rotating = sum(factor == 1.0 for factor in factors)
    if len(factors) != size or not all(factor > 1e20 for factor in factors[rotating:]):
        raise UnsupportedModelError(
            f"{metadata.file}: rope_freqs.weight {shown(factors)} is not supported: it must have "
            f"{size} factors, ones and then numbers above 1e20"
        )
    return {
        "rope_type": "proportional",
        "rope_theta": rope["rope_theta"],
        "partial_rotary_factor": rotating / size,
    }


def _cohere2(metadata: GGUFMetadata, config: Fields) -> Fields:
    return {**windows(metadata, config, 4), "layer_norm_eps": config["rms_norm_eps"]}


_COMMAND_R = GgufFamily(
    "CohereForCausalLM",
    numbers={"logit_scale": "logit_scale"},
    fields=lambda metadata, config: {"layer_norm_eps": config["rms_norm_eps"]},
)


def _gemma(num_layers: int) -> Callable[[GGUFMetadata, Fields], Fields]:
    """Return the fields of Gemma 2 or 3. The largest model, of `num_layers`, scales differently:
    no key says so.
    """

    def fields(metadata: GGUFMetadata, config: Fields) -> Fields:
        scalar = config["head_dim"]
        if config["num_hidden_layers"] == num_layers:
            scalar = config["hidden_size"] // config["num_attention_heads"]
        own = {"query_pre_attn_scalar": scalar}
        if metadata.architecture == "gemma2":
            return own | windows(metadata, config, 2, default=4096)
        own |= windows(metadata, config, 6)
        return own | theta_of_windows(metadata, config, 10_000.0)

    return fields


def _mistral3(metadata: GGUFMetadata, config: Fields) -> Fields:
    """The queries' factor: llama.cpp has it grow at multiples of the original context."""
    length = metadata.size("attention.temperature_length", 0)
    if metadata.own("attention.temperature_scale") is None:
        return {}
    rope: Fields = config["rope_parameters"]
    original = metadata.size("rope.scaling.original_context_length")
    length = length or original
    if length != original or rope.get("rope_type") != "yarn":
        rule = f"the original context of yarn scaling, {original}"
        raise metadata.unsupported("attention.temperature_length", length, rule)
    beta = metadata.number("attention.temperature_scale")
    return {"rope_parameters": {**rope, "llama_4_scaling_beta": beta}}


def _phi3(metadata: GGUFMetadata, config: Fields) -> Fields:
    window = metadata.size("attention.sliding_window", 0)
    fields: Fields = {"sliding_window": window or None}
    original = "original_max_position_embeddings"
    if original in config["rope_parameters"]:  # beside which config.json has it
        fields[original] = config["rope_parameters"][original]
    return fields


def _olmo2(metadata: GGUFMetadata, config: Fields) -> Fields:
    """Olmo 3 is an Olmo 2 with windows."""
    sliding = windows(metadata, config, 4)
    sliding |= theta_of_windows(metadata, config, config["rope_parameters"]["rope_theta"])
    if sliding["sliding_window"] is None:
        return {}
    return {"architectures": ["Olmo3ForCausalLM"], **sliding}


def _qwen3moe(metadata: GGUFMetadata, config: Fields) -> Fields:
    """llama.cpp always normalises the weights of a token's experts."""
    size = max(1, config["intermediate_size"] // config["num_experts_per_tok"])
    return {
        "moe_intermediate_size": metadata.size("expert_feed_forward_length", size),
        "norm_topk_prob": True,
    }


def _qwen3vl(metadata: GGUFMetadata, config: Fields) -> Fields:
    """The layers after which something of a picture is added are the first ones."""
    number = metadata.size("n_deepstack_layers", 0)
    return {**rope_sections(metadata, config), "n_deepstack_layers": number}


def _gpt_oss(metadata: GGUFMetadata, config: Fields) -> Fields:
    """The bounds of YaRN's ramp are not rounded, as in the published config.json."""
    return {
        **windows(metadata, config, 2),
        "rope_parameters": {**config["rope_parameters"], "truncate": False},
        "split_experts": True,
    }


_QWEN3_MOE = GgufFamily(
    "Qwen3MoeForCausalLM",
    sizes={"expert_count": "num_experts", "expert_used_count": "num_experts_per_tok"},
    fields=_qwen3moe,
    neutral={"expert_gating_func": (1,)},  # a softmax
)


FAMILIES: dict[str, GgufFamily] = {
    **ROUTED,
    **STATES,
    "cohere2": _COMMAND_R._replace(architecture="Cohere2ForCausalLM", fields=_cohere2),
    "command-r": _COMMAND_R,
    "ernie4_5": GgufFamily(
        "Ernie4_5ForCausalLM",
        fields=lambda metadata, config: {"use_bias": config["attention_bias"]},
    ),
    "exaone4": GgufFamily(
        "Exaone4ForCausalLM",
        modules=SANDWICH,
        fields=lambda metadata, config: windows(metadata, config, 4),
    ),
    "gemma2": GgufFamily(
        "Gemma2ForCausalLM",
        modules=SANDWICH,
        norm_offset=-1.0,
        numbers={**SOFTCAP, "attn_logit_softcapping": "attn_logit_softcapping"},
        fields=_gemma(46),
    ),
    "gemma3": GgufFamily(
        "Gemma3ForCausalLM",
        modules=SANDWICH,
        norm_offset=-1.0,
        numbers=SOFTCAP,
        fields=_gemma(62),
    ),
    "gemma4": GgufFamily(
        "Gemma4ForCausalLM",
        modules={
            **SANDWICH,
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
        numbers=SOFTCAP,
        per_layer=frozenset({"attention.head_count_kv", "feed_forward_length"}),
        fields=_gemma4,
    ),
    "gpt-oss": GgufFamily(
        "GptOssForCausalLM",
        modules={
            "post_attention_norm": "post_attention_layernorm",
            "ffn_gate_inp": "mlp.router",
        },
        tensors={"attn_sinks.weight": "self_attn.sinks"},
        sizes=LOCAL_EXPERT_SIZES,
        fields=_gpt_oss,
    ),
    "hunyuan-dense": GgufFamily(
        "HunYuanDenseV1ForCausalLM",
        modules={
            "attn_q_norm": "self_attn.query_layernorm",
            "attn_k_norm": "self_attn.key_layernorm",
        },
    ),
    "llama": GgufFamily("LlamaForCausalLM", permuted=True),
    "mistral3": GgufFamily("Ministral3ForCausalLM", permuted=True, fields=_mistral3),
    "olmo2": GgufFamily("Olmo2ForCausalLM", modules=SANDWICH, fields=_olmo2),
    "phi3": GgufFamily(
        "Phi3ForCausalLM",
        modules={"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
        partial_rotation=True,
        fields=_phi3,
    ),
    "qwen2": GgufFamily("Qwen2ForCausalLM"),
    "qwen2vl": GgufFamily("Qwen2_5_VLForConditionalGeneration", fields=rope_sections),
    "qwen3": GgufFamily("Qwen3ForCausalLM"),
    "qwen3moe": _QWEN3_MOE,
    "qwen3vl": GgufFamily("Qwen3VLForConditionalGeneration", fields=_qwen3vl),
    "qwen3vlmoe": _QWEN3_MOE._replace(
        architecture="Qwen3VLMoeForConditionalGeneration",
        fields=lambda metadata, config: {
            **_qwen3moe(metadata, config),
            **_qwen3vl(metadata, config),
            "split_experts": True,
        },
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


def family_of(metadata: GGUFMetadata) -> GgufFamily:
    """Return the family of a file.

    Raises:
        UnsupportedModelError: there is none.
    """
    family = FAMILIES.get(metadata.architecture)
    if family is None:
        raise UnsupportedModelError(
            f"{metadata.file}: general.architecture {shown(metadata.architecture)} is not "
            f"supported ({', '.join(sorted(FAMILIES))})"
        )
    return family
