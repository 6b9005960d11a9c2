"""Models with LayerNorms in a GGUF file: GPT-2, GPT-NeoX, Command R.

Reads metadata, no weight. Imports no torch.
"""

from nanovllm.loading.gguf_family import Fields, GgufFamily, Order, Reading, windows
from nanovllm.loading.gguf_header import GGUFMetadata
from nanovllm.options.validation import check_bool


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
