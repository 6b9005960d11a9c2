"""Gemma 4 in a GGUF file: names, sizes that differ between layers, and which layers share.

Reads metadata, no weight. Imports no torch.
"""

from nanovllm.errors import UnsupportedModelError
from nanovllm.loading.gguf_family import SANDWICH, SOFTCAP, Fields, GgufFamily
from nanovllm.loading.gguf_header import MAX_SIZE, GGUFMetadata
from nanovllm.options.validation import check_int, shown


def _fields(metadata: GGUFMetadata, config: Fields) -> Fields:
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
        **_mlp_sizes(metadata, num_layers, num_shared),
        "rope_parameters": {
            "full_attention": _full_rope(metadata, config),
            "sliding_attention": {"rope_theta": metadata.number("rope.freq_base_swa", 10_000.0)},
        },
    }


def _mlp_sizes(metadata: GGUFMetadata, num_layers: int, num_shared: int) -> Fields:
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


def _full_rope(metadata: GGUFMetadata, config: Fields) -> Fields:
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


GEMMA4 = GgufFamily(
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
    fields=_fields,
)
