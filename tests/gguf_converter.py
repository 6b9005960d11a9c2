"""Writes GGUF files of transformers' models as llama.cpp's converter does, for each architecture.

Names come from the gguf package's tables. What the converter changes in the numbers is here: what
it adds to norms, the order of rows, experts side by side. Knows nothing of the engine.
"""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import torch
from transformers import PreTrainedModel

from tests.gguf_files import quantized, to_llama_order

PERMUTED = ("llama", "mistral3", "granite", "granitemoe", "granitehybrid", "smollm3")
PERMUTED += ("nemotron_h", "nemotron_h_moe")
GRANITE = ("granite", "granitemoe", "granitehybrid")
MAMBA = ("falcon-h1", "granitehybrid")
ROUTED = ("laguna", "mellum", "glm4moe", "ernie4_5-moe", "afmoe", "minimax-m2")
LATENT = ("deepseek2", "minicpm3")
NEMOTRON = ("nemotron_h", "nemotron_h_moe")
MAMBA += NEMOTRON
NO_ROPE = {"rope_type": "default", "rope_theta": 0}
LAGUNA = {"g_proj": "attn_gate", "q_norm": "attn_q_norm", "k_norm": "attn_k_norm"}
LAGUNA |= {"e_score_correction": "exp_probs_b"}
KIND = gguf.GGMLQuantizationType


def convert(
    model: PreTrainedModel,
    file: Path,
    architecture: str,
    *,
    kind: str = "F32",
    metadata: dict[str, Any] | None = None,
    shapes: dict[str, tuple[int, ...]] | None = None,
    extra: dict[str, torch.Tensor] | None = None,
) -> str:
    """Write `model` to `file`, without a tokenizer.

    Args:
        architecture: llama.cpp's name of it.
        kind: the type of all matrices.
        metadata: fields to add or replace, without the architecture; None leaves one out.
        shapes: other shapes of tensors, by their names in the file: they become zeros.
        extra: tensors to add, by their names in the file.
    """
    config = plain(model.config)
    if architecture in NEMOTRON:
        config.num_hidden_layers = len(config.layers_block_type)
    writer = gguf.GGUFWriter(file, architecture)
    for key, value in {**settings(config, architecture), **(metadata or {})}.items():
        if value is not None:
            name = key if key.startswith("tokenizer.") else f"{architecture}.{key}"
            kind_of_value = gguf.GGUFValueType.get_type(value)
            if type(value) is int:
                kind_of_value = gguf.GGUFValueType.UINT32
            writer.add_key_value(name, value, kind_of_value)
    writer.add_eos_token_id(2)
    rng = np.random.default_rng(0)
    for name, tensor in (*tensors(model, config, architecture), *(extra or {}).items()):
        if shapes and name in shapes:
            tensor = torch.zeros(shapes[name])
        is_matrix = tensor.ndim > 1 and name.endswith("weight") and "_norm." not in name
        used = kind if is_matrix else "F32"
        block = gguf.GGML_QUANT_SIZES[KIND[used]][0]
        used = used if tensor.shape[-1] % block == 0 else "F16"
        values = tensor.contiguous().float().numpy()
        blocks = random_mxfp4(values, rng) if used == "MXFP4" else quantized(values, used, rng)
        writer.add_tensor(name, blocks, raw_dtype=KIND[used])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return str(file)


def plain(config: Any) -> Any:
    """Return the fields of `config`; sizes of Gemma 4's layers with full attention have names."""
    fields = config.to_dict()
    if full := fields.get("per_layer_config"):
        own = next(iter(full.values()))
        fields["global_head_dim"] = own["head_dim"]
        fields["num_global_key_value_heads"] = own.get("num_key_value_heads")
    return SimpleNamespace(**fields)


def random_mxfp4(values: np.ndarray[Any, Any], rng: np.random.Generator) -> Any:
    """Return blocks of MXFP4 in the shape of `values`: an exponent and 32 numbers of 4 bits."""
    blocks = rng.integers(0, 256, (*values.shape[:-1], values.shape[-1] // 32, 17), np.uint8)
    blocks[..., 0] = rng.integers(121, 125, blocks.shape[:-1])
    return blocks.reshape(*values.shape[:-1], -1)


def settings(config: Any, architecture: str) -> dict[str, Any]:
    """Return the metadata: what the converter writes for all architectures, and for this one."""
    rope = dict(getattr(config, "rope_parameters", None) or NO_ROPE)
    typed = rope.get("full_attention", rope)
    eps = {
        ("rms_" * name.startswith(("rms", "norm")), getattr(config, name))
        for name in ("rms_norm_eps", "norm_eps", "layer_norm_eps", "layer_norm_epsilon")
        if hasattr(config, name)
    }
    ((kind, epsilon),) = eps
    found = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": getattr(config, "intermediate_size", None),
        "block_count": config.num_hidden_layers,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        f"attention.layer_norm_{kind}epsilon": epsilon,
        "rope.freq_base": float(typed["rope_theta"]) or None,
        "rope.freq_base_swa": rope.get("sliding_attention", {}).get("rope_theta"),
    }
    if (head_dim := getattr(config, "head_dim", 0)) and architecture not in ("phi3", *GRANITE):
        found |= {"attention.key_length": head_dim, "attention.value_length": head_dim}
    if architecture in PERMUTED:
        found["rope.dimension_count"] = head_dim or config.hidden_size // config.num_attention_heads
    if typed["rope_type"] in ("linear", "yarn"):
        found |= {"rope.scaling.type": typed["rope_type"], "rope.scaling.factor": typed["factor"]}
    if typed["rope_type"] == "yarn":
        original = typed["original_max_position_embeddings"]
        found |= {"rope.scaling.original_context_length": original}
        for key in ("beta_fast", "beta_slow"):
            if typed.get(key):
                found[f"rope.scaling.yarn_{key}"] = float(typed[key])
        if typed.get("attention_factor"):
            found["rope.scaling.yarn_attn_factor"] = typed["attention_factor"]
    if architecture == "hunyuan-dense" and typed.get("alpha"):
        theta = typed["rope_theta"] * typed["alpha"] ** (head_dim / (head_dim - 2))
        found |= {"rope.freq_base": theta, "rope.scaling.type": "none", "rope.scaling.factor": 1.0}
    return found | own_settings(config, architecture, typed)


def own_settings(config: Any, architecture: str, rope: dict[str, Any]) -> dict[str, Any]:
    slides = [kind == "sliding_attention" for kind in getattr(config, "layer_types", None) or []]
    window = {"attention.sliding_window": getattr(config, "sliding_window", None)}
    pattern = {**window, "attention.sliding_window_pattern": slides}
    if architecture == "gemma2":
        return {
            **window,
            "attn_logit_softcapping": config.attn_logit_softcapping,
            "final_logit_softcapping": config.final_logit_softcapping,
            "rope.freq_base": None,
        }
    if architecture == "gemma3":
        return window | {"final_logit_softcapping": config.final_logit_softcapping}
    if architecture == "gemma4":
        return gemma4_settings(config, slides) | window
    if architecture in ("olmo2", "exaone4") and window["attention.sliding_window"]:
        return pattern
    if architecture == "gpt-oss":
        return {
            **window,
            "expert_count": config.num_local_experts,
            "expert_used_count": config.num_experts_per_tok,
            "expert_feed_forward_length": config.intermediate_size,
        }
    if architecture in ROUTED:
        return routed_settings(config, architecture, rope)
    if architecture in LATENT:
        return latent_settings(config, architecture, rope)
    if architecture in ("command-r", "cohere2"):
        scale = {"logit_scale": config.logit_scale, "rope.scaling.type": "none"}
        return scale | (window if architecture == "cohere2" else {})
    if architecture == "qwen3moe":
        return expert_settings(config, config.num_local_experts)
    if architecture.startswith("qwen35"):
        return qwen35_settings(config, architecture, rope)
    if architecture.startswith("lfm2"):
        return lfm2_settings(config, architecture)
    if architecture in GRANITE:
        return granite_settings(config)
    if architecture in NEMOTRON:
        return nemotron_settings(config, architecture, rope)
    if architecture in MAMBA:
        return mamba_settings(config)
    if architecture == "mistral3" and "llama_4_scaling_beta" in rope:
        return {
            "rope.scaling.yarn_log_multiplier": rope["mscale_all_dim"],
            "attention.temperature_scale": rope["llama_4_scaling_beta"],
        }
    if architecture == "phi3":
        size = config.hidden_size // config.num_attention_heads
        original = config.original_max_position_embeddings
        found = {
            "attention.sliding_window": getattr(config, "sliding_window", None) or 0,
            "rope.dimension_count": int(rope.get("partial_rotary_factor", 1.0) * size),
            "rope.scaling.original_context_length": original,
        }
        if rope.get("long_factor"):
            scale = config.max_position_embeddings / original
            factor = float(np.sqrt(1 + np.log(scale) / np.log(original)))
            found["rope.scaling.attn_factor"] = factor
        return found
    return {}


def expert_settings(config: Any, num_experts: int) -> dict[str, Any]:
    return {
        "expert_count": num_experts,
        "expert_used_count": config.num_experts_per_tok,
        "expert_feed_forward_length": config.moe_intermediate_size,
    }


def routed_settings(config: Any, architecture: str, rope: dict[str, Any]) -> dict[str, Any]:
    """Return what the converter writes of experts that a bias chooses, and of layers without."""
    names = {
        "expert_count": ("n_routed_experts", "moe_num_experts", "num_local_experts", "num_experts"),
        "expert_used_count": ("num_experts_per_tok", "moe_k"),
        "expert_feed_forward_length": ("moe_intermediate_size", "intermediate_size"),
        "expert_shared_count": ("n_shared_experts", "moe_num_shared_experts", "num_shared_experts"),
        "leading_dense_block_count": (
            "first_k_dense_replace",
            "moe_layer_start_index",
            "num_dense_layers",
        ),
        "interleave_moe_layer_step": ("moe_layer_interval",),
        "expert_weights_scale": ("routed_scaling_factor", "route_scale"),
        "expert_weights_norm": ("norm_topk_prob", "route_norm"),
    }
    found = {}
    for key, fields in names.items():
        values = [getattr(config, field) for field in fields if hasattr(config, field)]
        if values:
            found[key] = values[0]
    if architecture in ("mellum", "laguna"):
        types = config.layer_types
        found["attention.sliding_window"] = config.sliding_window
    if architecture == "mellum":
        windows = [kind == "sliding_attention" for kind in types]
        found["attention.sliding_window_pattern"] = windows
        found["expert_weights_norm"] = None
    if architecture == "laguna":
        found["attention.head_count"] = config.num_attention_heads_per_layer
        found["expert_shared_feed_forward_length"] = config.shared_expert_intermediate_size
        found["expert_weights_scale"] = config.moe_routed_scaling_factor
        found["expert_weights_norm"] = True
        found["leading_dense_block_count"] = config.mlp_layer_types.count("dense")
        for kind, key in (("full_attention", ""), ("sliding_attention", "_swa")):
            part = config.rope_parameters[kind].get("partial_rotary_factor", 1.0)
            found[f"rope.dimension_count{key}"] = int(config.head_dim * part)
    if architecture not in ("ernie4_5-moe", "deepseek2", "mellum"):
        found["expert_gating_func"] = 2
    if architecture in ("glm4moe", "minimax-m2"):
        part = rope.get("partial_rotary_factor", 0.5)
        found["rope.dimension_count"] = int(config.head_dim * part)
    if architecture == "afmoe":
        found["attention.sliding_window"] = config.sliding_window
    return found


def latent_settings(config: Any, architecture: str, rope: dict[str, Any]) -> dict[str, Any]:
    nope, rotating = config.qk_nope_head_dim, config.qk_rope_head_dim
    found = {
        "vocab_size": config.vocab_size,
        "attention.q_lora_rank": config.q_lora_rank,
        "attention.kv_lora_rank": config.kv_lora_rank,
        "attention.key_length": nope + rotating,
        "attention.value_length": None,
        "rope.dimension_count": rotating,
    }
    if architecture == "minicpm3":
        return found
    found |= routed_settings(config, architecture, rope) | {
        "attention.head_count_kv": 1,
        "attention.key_length": config.kv_lora_rank + rotating,
        "attention.value_length": config.kv_lora_rank,
        "attention.key_length_mla": nope + rotating,
        "attention.value_length_mla": config.v_head_dim,
        "expert_group_count": getattr(config, "n_group", None),
        "expert_group_used_count": getattr(config, "topk_group", None),
    }
    if "mscale_all_dim" in rope:
        found["rope.scaling.yarn_log_multiplier"] = 0.1 * rope["mscale_all_dim"]
    if config.model_type == "deepseek_v2":
        found |= {"expert_gating_func": 1, "expert_weights_norm": None}
    return found


def qwen35_settings(config: Any, architecture: str, rope: dict[str, Any]) -> dict[str, Any]:
    heads, dim = config.linear_num_value_heads, config.linear_value_head_dim
    found = {
        "ssm.conv_kernel": config.linear_conv_kernel_dim,
        "ssm.state_size": config.linear_key_head_dim,
        "ssm.group_count": config.linear_num_key_heads,
        "ssm.time_step_rank": heads,
        "ssm.inner_size": heads * dim,
        "attention.recurrent_layers": [kind != "full_attention" for kind in config.layer_types],
        "full_attention_interval": 4,
        "rope.dimension_count": int(config.head_dim * rope["partial_rotary_factor"]),
        "rope.dimension_sections": [11, 11, 10, 0],
    }
    if architecture == "qwen35moe":
        found |= expert_settings(config, config.num_experts)
        shared = config.shared_expert_intermediate_size
        found |= {"feed_forward_length": None, "expert_shared_feed_forward_length": shared}
    return found


def granite_settings(config: Any) -> dict[str, Any]:
    found = {
        "attention.scale": config.attention_multiplier,
        "embedding_scale": config.embedding_multiplier,
        "residual_scale": config.residual_multiplier,
        "logit_scale": config.logits_scaling,
    }
    if hasattr(config, "num_local_experts"):
        found |= {
            "expert_count": config.num_local_experts,
            "expert_used_count": config.num_experts_per_tok,
            "expert_shared_feed_forward_length": config.shared_intermediate_size,
        }
    if hasattr(config, "mamba_n_heads"):
        attends = [kind == "full_attention" for kind in config.layer_types]
        found |= mamba_settings(config) | {
            "attention.head_count_kv": [config.num_key_value_heads * int(has) for has in attends],
            "rope.scaling.finetuned": all(attends),
        }
    return found


def mamba_settings(config: Any) -> dict[str, Any]:
    return {
        "vocab_size": config.vocab_size,
        "ssm.conv_kernel": config.mamba_d_conv,
        "ssm.inner_size": getattr(
            config, "mamba_d_ssm", config.mamba_n_heads * config.mamba_d_head
        ),
        "ssm.state_size": config.mamba_d_state,
        "ssm.time_step_rank": config.mamba_n_heads,
        "ssm.group_count": config.mamba_n_groups,
    }


def nemotron_settings(config: Any, architecture: str, rope: dict[str, Any]) -> dict[str, Any]:
    types, is_moe = config.layers_block_type, architecture.endswith("moe")
    size = config.moe_intermediate_size if is_moe else config.intermediate_size
    heads = config.num_key_value_heads
    found = {
        "vocab_size": config.vocab_size,
        "attention.head_count_kv": [heads * (kind == "full_attention") for kind in types],
        "attention.layer_norm_rms_epsilon": config.layer_norm_epsilon,
        "feed_forward_length": [size * (kind in ("mlp", "moe")) for kind in types],
        "rope.dimension_count": config.hidden_size // config.num_attention_heads,
        "rope.scaling.finetuned": False,
        "ssm.conv_kernel": config.conv_kernel,
        "ssm.inner_size": config.mamba_num_heads * config.mamba_head_dim,
        "ssm.state_size": config.ssm_state_size,
        "ssm.time_step_rank": config.mamba_num_heads,
        "ssm.group_count": config.n_groups,
    }
    if is_moe:
        found |= routed_settings(config, architecture, rope)
        found["expert_shared_feed_forward_length"] = config.moe_shared_expert_intermediate_size
        found["expert_group_count"] = config.n_group
        del found["expert_gating_func"]
    return found


def lfm2_settings(config: Any, architecture: str) -> dict[str, Any]:
    attends = [kind == "full_attention" for kind in config.layer_types]
    found = {
        "vocab_size": config.vocab_size,
        "attention.head_count_kv": [config.num_key_value_heads * int(has) for has in attends],
        "shortconv.l_cache": config.conv_L_cache,
    }
    if architecture == "lfm2moe":
        found |= expert_settings(config, config.num_experts)
        found |= {"leading_dense_block_count": config.num_dense_layers, "expert_gating_func": 2}
    return found


def gemma4_settings(config: Any, slides: list[bool]) -> dict[str, Any]:
    num_layers, shared = config.num_hidden_layers, config.num_kv_shared_layers
    full, size = config.global_head_dim, config.intermediate_size
    found = {
        "attention.shared_kv_layers": shared,
        "embedding_length_per_layer_input": config.hidden_size_per_layer_input or 0,
        "attention.sliding_window_pattern": slides,
        "attention.key_length": full,
        "attention.value_length": full,
        "attention.key_length_swa": config.head_dim,
        "attention.value_length_swa": config.head_dim,
        "rope.dimension_count": full,
        "rope.dimension_count_swa": config.head_dim,
        "final_logit_softcapping": config.final_logit_softcapping,
    }
    if config.use_double_wide_mlp:
        wide = [size] * (num_layers - shared) + [2 * size] * shared
        found["feed_forward_length"] = wide
    if config.num_global_key_value_heads is not None:
        counts = [
            config.num_key_value_heads if slide else config.num_global_key_value_heads
            for slide in slides
        ]
        found["attention.head_count_kv"] = counts
    return found


def tensors(
    model: PreTrainedModel, config: Any, architecture: str
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors as the converter writes them."""
    numbers = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
    like = {"mellum": "qwen3moe", "laguna": "ernie4_5-moe"}.get(architecture, architecture)
    table = gguf.get_tensor_name_map(numbers[like], config.num_hidden_layers)
    for name, tensor in rope_tensors(config, architecture):
        yield name, tensor
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        for part, values in parts(name, tensor, config, architecture):
            named = table.get_name(part, (".weight", ".bias"))
            if named is None and architecture == "laguna":  # the gguf package does not know it
                _, _, layer, *_, module, kind = part.split(".")
                named = f"blk.{layer}.{LAGUNA[module]}.{kind}"
            assert named is not None, part
            yield named, values


def parts(
    name: str, tensor: torch.Tensor, config: Any, architecture: str
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield what the converter makes of one tensor, under transformers' names."""
    if architecture in ("gemma2", "gemma3") and name.endswith("norm.weight"):
        tensor = tensor + 1
    if architecture in PERMUTED and ".q_proj." in name:
        tensor = to_llama_order(tensor, config.num_attention_heads)
    if architecture in PERMUTED and ".k_proj." in name:
        tensor = to_llama_order(tensor, config.num_key_value_heads)
    if architecture.startswith("qwen35"):
        name, tensor = qwen35_tensor(name, tensor, config)
    if architecture in GRANITE:
        name = granite_name(name, getattr(config, "num_local_experts", 0))
    if architecture == "falcon-h1":
        tensor = falcon_tensor(name, tensor, config)
    if architecture in NEMOTRON:
        name = name.replace("model.", "backbone.")
    if architecture in MAMBA:
        name, tensor = mamba_tensor(name, tensor, config)
    if name.endswith(("sinks", "layer_scalar")):
        name = f"{name}.weight"
    if name.endswith("expert_bias"):
        name = f"{name}.bias"
    if name.endswith("e_score_correction_bias"):
        name, tensor = name.replace("_bias", ".bias"), tensor.flatten()
        name = name.replace("mlp.gate.moe_statics", "mlp.moe_statics")
    if architecture == "minimax-m2":
        name = name.replace(".mlp.e_score", ".block_sparse_moe.e_score")
    if ".conv.conv." in name:
        tensor = tensor.squeeze(1)
    if architecture == "gpt-oss" and ".experts." in name:
        stem, bias = name.removesuffix("_bias"), name.endswith("_bias")
        ending = "bias" if bias else "weight"
        tensor = tensor if bias else tensor.transpose(-1, -2)
        if "gate_up" in stem:
            yield f"{stem.replace('gate_up', 'gate')}.{ending}", tensor[:, ::2]
            yield f"{stem.replace('gate_up', 'up')}.{ending}", tensor[:, 1::2]
        else:
            yield f"{stem}.{ending}", tensor
    elif ".feed_forward.experts." in name:  # the names of checkpoints, which the table has
        stem, gates = name.rpartition(".")[0], ("w1", "w3")
        linears = tensor.chunk(2, dim=1) if "gate_up" in name else (tensor,)
        for linear, values in zip(gates if "gate_up" in name else ("w2",), linears, strict=True):
            yield f"{stem.removeprefix('model.')}.{linear}.weight", values
    elif architecture == "deepseek2" and ".kv_b_proj." in name:
        by_head = tensor.unflatten(0, (config.num_attention_heads, -1))
        nope = config.qk_nope_head_dim
        yield name.replace("kv_b_proj", "k_b_proj"), by_head[:, :nope].transpose(1, 2)
        yield name.replace("kv_b_proj", "v_b_proj"), by_head[:, nope:]
    elif ".gate_up_proj" in name and architecture != "phi3":
        ending = ".weight" if ".experts." in name else ""
        gate, up = tensor.chunk(2, dim=-2)
        yield f"{name.replace('gate_up', 'gate')}{ending}", gate
        yield f"{name.replace('gate_up', 'up')}{ending}", up
    elif ".experts." in name:
        yield f"{name}.weight", tensor
    else:
        yield name, tensor


def granite_name(name: str, num_experts: int) -> str:
    """Return the name that other models have for a tensor of Granite's."""
    name = name.replace("block_sparse_moe.experts.", "mlp.experts.")
    name = name.replace("block_sparse_moe.router.", "block_sparse_moe.router.layer.")
    module = "mlp.shared_expert" if num_experts else "mlp"
    name = name.replace("shared_mlp.input_linear.", f"{module}.gate_up_proj.")
    return name.replace("shared_mlp.output_linear.", f"{module}.down_proj.")


def mamba_tensor(name: str, tensor: torch.Tensor, config: Any) -> tuple[str, torch.Tensor]:
    """Return a tensor of Mamba-2 as the converter names and changes it."""
    module = name.removesuffix(".weight").rpartition(".")[2]
    if module == "conv1d":
        tensor = tensor.squeeze(1)
    elif module in ("A_log", "D"):
        tensor = (-torch.exp(tensor) if module == "A_log" else tensor)[:, None]
    elif ".mamba.norm." in name:
        tensor = tensor.reshape(config.mamba_n_groups, -1)
    elif ".mixer.norm." in name:
        tensor = tensor.reshape(config.n_groups, -1)
    if ".mixer.experts." in name:
        name = name.replace("backbone.", "model.").replace(".mixer.", ".mlp.")
    return name.replace(".dt_bias", ".dt_proj.bias"), tensor


def falcon_tensor(name: str, tensor: torch.Tensor, config: Any) -> torch.Tensor:
    """Return a tensor of Falcon-H1 times the factors on what it reads and returns."""
    module = name.removesuffix(".weight").rpartition(".")[2]
    reads, keys = config.attention_in_multiplier, config.key_multiplier
    factors = {
        "q_proj": reads,
        "k_proj": reads * keys,
        "v_proj": reads,
        "o_proj": config.attention_out_multiplier,
        "gate_proj": config.mlp_multipliers[0],
        "down_proj": config.mlp_multipliers[1],
        "out_proj": config.ssm_out_multiplier,
        "in_proj": config.ssm_in_multiplier,
        "lm_head": config.lm_head_multiplier,
        "embed_tokens": config.embedding_multiplier,
    }
    tensor = tensor * factors.get(module, 1.0)
    if module != "in_proj":
        return tensor
    group = config.mamba_n_groups * config.mamba_d_state
    sizes = [config.mamba_d_ssm] * 2 + [group] * 2 + [config.mamba_n_heads]
    parts = zip(tensor.split(sizes), config.ssm_multipliers, strict=True)
    return torch.cat([part * factor for part, factor in parts])


def qwen35_tensor(name: str, tensor: torch.Tensor, config: Any) -> tuple[str, torch.Tensor]:
    """Return a tensor of Qwen3.5 as the converter names and changes it: value heads tiled."""
    if name.endswith("norm.weight") and ".linear_attn." not in name:
        return name, tensor + 1
    keys, dim = config.linear_num_key_heads, config.linear_value_head_dim
    share = config.linear_num_value_heads // keys
    module = name.removesuffix(".weight").rpartition(".")[2]
    if module in ("in_proj_qkv", "conv1d"):
        tensor = tensor.squeeze(1)
        start = 2 * keys * config.linear_key_head_dim
        tensor = torch.cat([tensor[:start], tiled(tensor[start:], keys, share, dim)])
    elif module == "in_proj_z":
        tensor = tiled(tensor, keys, share, dim)
    elif module in ("in_proj_a", "in_proj_b", "A_log", "dt_bias"):
        tensor = tiled(tensor, keys, share, 1)
    elif module == "out_proj":
        tensor = tiled(tensor.T, keys, share, dim).T
    elif module == "shared_expert_gate":
        tensor = tensor.squeeze()
    if module == "A_log":
        return name, -torch.exp(tensor)
    return name.replace(".dt_bias", ".dt_proj.bias"), tensor


def tiled(rows: torch.Tensor, key_heads: int, share: int, dim: int) -> torch.Tensor:
    """Return rows of value heads, grouped by key head, with one of each key head in turn."""
    by_head = rows.reshape(key_heads, share, dim, -1)
    return by_head.permute(1, 0, 2, 3).reshape(rows.shape)


def rope_tensors(config: Any, architecture: str) -> Iterator[tuple[str, torch.Tensor]]:
    rope = getattr(config, "rope_parameters", NO_ROPE)
    if architecture == "phi3" and rope.get("long_factor"):
        yield "rope_factors_long.weight", torch.tensor(rope["long_factor"])
        yield "rope_factors_short.weight", torch.tensor(rope["short_factor"])
    if architecture == "gemma4":
        half = config.global_head_dim // 2
        rotating = int(half * rope["full_attention"]["partial_rotary_factor"])
        yield "rope_freqs.weight", torch.tensor([1.0] * rotating + [1e30] * (half - rotating))
    if rope.get("rope_type") == "llama3":
        yield "rope_freqs.weight", llama3_factors(rope, config.head_dim)


def llama3_factors(rope: dict[str, Any], head_dim: int) -> torch.Tensor:
    """Return what divides the angles of each pair, as the converter computes it."""
    found = []
    for pair in range(head_dim // 2):
        wavelength = 2 * np.pi * rope["rope_theta"] ** (2 * pair / head_dim)
        original, low, high = (
            rope["original_max_position_embeddings"],
            rope["low_freq_factor"],
            rope["high_freq_factor"],
        )
        smooth = (original / wavelength - low) / (high - low)
        factor = 1 / ((1 - smooth) / rope["factor"] + smooth)
        if wavelength < original / high:
            factor = 1.0
        elif wavelength > original / low:
            factor = rope["factor"]
        found.append(factor)
    return torch.tensor(found, dtype=torch.float32)
