"""What is specific to llama.cpp's architectures in a GGUF file: names of tensors, the order
and the offset of their numbers, and settings. A new one is one entry of FAMILIES.

Reads metadata, no weight. Imports no torch.
"""

from collections.abc import Callable

from nanovllm.errors import UnsupportedModelError
from nanovllm.loading.gguf_family import (
    EXPERTS,
    SANDWICH,
    SOFTCAP,
    Fields,
    GgufFamily,
    Order,
    Reading,
    theta_of_windows,
    windows,
)
from nanovllm.loading.gguf_gemma4 import GEMMA4
from nanovllm.loading.gguf_header import GGUFMetadata
from nanovllm.loading.gguf_latent import DEEPSEEK2, MINICPM3
from nanovllm.loading.gguf_qwen35 import QWEN35, QWEN35_MOE
from nanovllm.loading.gguf_routed import (
    AFMOE,
    ERNIE4_5_MOE,
    GLM4_MOE,
    LAGUNA,
    MELLUM,
    MINIMAX_M2,
)
from nanovllm.loading.gguf_states import (
    FALCON_H1,
    GRANITE,
    GRANITE_HYBRID,
    GRANITE_MOE,
    LFM2,
    LFM2_MOE,
    NEMOTRON_H,
    NEMOTRON_H_MOE,
)
from nanovllm.options.validation import check_bool, shown


def _gpt2(metadata: GGUFMetadata, config: Fields) -> Fields:
    """The file has a linear's outputs first, like other models; GPT-2's checkpoints do not."""
    return {
        "n_inner": config["intermediate_size"],
        "layer_norm_epsilon": config["rms_norm_eps"],
        "transposed_linears": False,
    }


def _gpt_neox(metadata: GGUFMetadata, config: Fields) -> Fields:
    return {
        "hidden_act": "gelu",
        "layer_norm_eps": config["rms_norm_eps"],
        "attention_bias": "blk.0.attn_qkv.bias" in metadata.tensors,
        "use_parallel_residual": metadata.setting(
            "use_parallel_residual", check_bool, default=True
        ),
        "rope_parameters": {"partial_rotary_factor": 1.0, **config["rope_parameters"]},
    }


def _cohere2(metadata: GGUFMetadata, config: Fields) -> Fields:
    return {**windows(metadata, config, 4), "layer_norm_eps": config["rms_norm_eps"]}


GPT2 = GgufFamily(
    "GPT2LMHeadModel",
    layers="transformer.h",
    modules={
        "attn_norm": "ln_1",
        "attn_qkv": "attn.c_attn",
        "attn_output": "attn.c_proj",
        "ffn_norm": "ln_2",
        "ffn_up": "mlp.c_fc",
        "ffn_down": "mlp.c_proj",
    },
    tensors={
        "token_embd.weight": "transformer.wte.weight",
        "position_embd.weight": "transformer.wpe.weight",
        "output_norm.weight": "transformer.ln_f.weight",
        "output_norm.bias": "transformer.ln_f.bias",
    },
    fields=_gpt2,
)
GPT_NEOX = GgufFamily(
    "GPTNeoXForCausalLM",
    layers="gpt_neox.layers",
    modules={
        "attn_qkv": "attention.query_key_value",
        "attn_output": "attention.dense",
        "ffn_up": "mlp.dense_h_to_4h",
        "ffn_down": "mlp.dense_4h_to_h",
    },
    tensors={
        "token_embd.weight": "gpt_neox.embed_in.weight",
        "output_norm.weight": "gpt_neox.final_layer_norm.weight",
        "output_norm.bias": "gpt_neox.final_layer_norm.bias",
        "output.weight": "embed_out.weight",
    },
    partial_rotation=True,
    fields=_gpt_neox,
    readings=lambda config: {
        "attn_qkv": Reading(Order(config["num_attention_heads"], config["head_dim"]))
    },
)
COMMAND_R = GgufFamily(
    "CohereForCausalLM",
    numbers={"logit_scale": "logit_scale"},
    fields=lambda metadata, config: {"layer_norm_eps": config["rms_norm_eps"]},
)
COHERE2 = COMMAND_R._replace(architecture="Cohere2ForCausalLM", fields=_cohere2)


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


def _gpt_oss(metadata: GGUFMetadata, config: Fields) -> Fields:
    """The bounds of YaRN's ramp are not rounded, as in the published config.json."""
    return {
        **windows(metadata, config, 2),
        "rope_parameters": {**config["rope_parameters"], "truncate": False},
        "split_experts": True,
    }


FAMILIES: dict[str, GgufFamily] = {
    "afmoe": AFMOE,
    "cohere2": COHERE2,
    "command-r": COMMAND_R,
    "deepseek2": DEEPSEEK2,
    "ernie4_5": GgufFamily(
        "Ernie4_5ForCausalLM",
        fields=lambda metadata, config: {"use_bias": config["attention_bias"]},
    ),
    "ernie4_5-moe": ERNIE4_5_MOE,
    "exaone4": GgufFamily(
        "Exaone4ForCausalLM",
        modules=SANDWICH,
        fields=lambda metadata, config: windows(metadata, config, 4),
    ),
    "falcon-h1": FALCON_H1,
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
    "gemma4": GEMMA4,
    "glm4moe": GLM4_MOE,
    "gpt-oss": GgufFamily(
        "GptOssForCausalLM",
        modules={
            **EXPERTS,
            "post_attention_norm": "post_attention_layernorm",
            "ffn_gate_inp": "mlp.router",
        },
        tensors={"attn_sinks.weight": "self_attn.sinks"},
        sizes={
            "expert_count": "num_local_experts",
            "expert_used_count": "num_experts_per_tok",
            "expert_feed_forward_length": "intermediate_size",
        },
        fields=_gpt_oss,
    ),
    "gpt2": GPT2,
    "gptneox": GPT_NEOX,
    "granite": GRANITE,
    "granitehybrid": GRANITE_HYBRID,
    "granitemoe": GRANITE_MOE,
    "hunyuan-dense": GgufFamily(
        "HunYuanDenseV1ForCausalLM",
        modules={
            "attn_q_norm": "self_attn.query_layernorm",
            "attn_k_norm": "self_attn.key_layernorm",
        },
    ),
    "laguna": LAGUNA,
    "lfm2": LFM2,
    "lfm2moe": LFM2_MOE,
    "llama": GgufFamily("LlamaForCausalLM", permuted=True),
    "mellum": MELLUM,
    "minicpm3": MINICPM3,
    "minimax-m2": MINIMAX_M2,
    "mistral3": GgufFamily(
        "Ministral3ForCausalLM",
        permuted=True,
        fields=_mistral3,
    ),
    "nemotron_h": NEMOTRON_H,
    "nemotron_h_moe": NEMOTRON_H_MOE,
    "olmo2": GgufFamily(
        "Olmo2ForCausalLM",
        modules=SANDWICH,
        fields=_olmo2,
    ),
    "phi3": GgufFamily(
        "Phi3ForCausalLM",
        modules={"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
        partial_rotation=True,
        fields=_phi3,
    ),
    "qwen2": GgufFamily("Qwen2ForCausalLM"),
    "qwen3": GgufFamily("Qwen3ForCausalLM"),
    "qwen35": QWEN35,
    "qwen35moe": QWEN35_MOE,
    "qwen3moe": GgufFamily(
        "Qwen3MoeForCausalLM",
        modules={**EXPERTS, "ffn_gate_inp": "mlp.gate"},
        sizes={
            "expert_count": "num_experts",
            "expert_used_count": "num_experts_per_tok",
        },
        fields=_qwen3moe,
        neutral={"expert_gating_func": (1,)},  # a softmax
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
            f"supported ({', '.join(FAMILIES)})"
        )
    return family
