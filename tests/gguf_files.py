"""Writes small GGUF files of random models, and safetensors checkpoints with the same weights.

Uses the gguf package's writer and its dequantisation; knows nothing of the engine.
"""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import save_file
from transformers import AutoConfig

from tests.checkpoints import random_model, write_json

SIZES: dict[str, Any] = {
    "vocab_size": 307,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 256,
    "eos_token_id": [7],
    "dtype": "float32",
    "rms_norm_eps": 1e-5,
}
"""Rows are multiples of 256, as K-quants need. So long a row has blocks of several scales."""
TYPES = (
    "F32 F16 BF16 Q8_0 Q4_0 Q4_1 Q5_0 Q5_1 Q2_K Q3_K Q4_K Q5_K Q6_K IQ4_NL".split()  # noqa: SIM905
)
KEPT = ("Q8_0", "Q5_0", "Q4_0", "Q4_1")
_SCALES = {
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "IQ4_NL": (0,),
}
"""Where blocks that the gguf package cannot make have float16 numbers."""
NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "embed_tokens": "token_embd",
    "norm": "output_norm",
    "lm_head": "output",
}


def gguf_name(name: str) -> str:
    """Return llama.cpp's name of transformers' tensor `name`."""
    parts = name.removeprefix("model.").split(".")
    prefix = f"blk.{parts[1]}." if parts[0] == "layers" else ""
    module = ".".join(parts[2:-1] if prefix else parts[:-1])
    return f"{prefix}{NAMES[module]}.{parts[-1]}"


def to_llama_order(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Reorder the rows of q or k as llama.cpp's converter does for its architecture llama."""
    halves = weight.reshape(num_heads, 2, -1, *weight.shape[1:])
    return halves.transpose(1, 2).reshape(weight.shape)


def from_llama_order(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    pairs = weight.reshape(num_heads, -1, 2, *weight.shape[1:])
    return pairs.transpose(1, 2).reshape(weight.shape)


def quantized(weight: np.ndarray[Any, Any], kind: str, rng: np.random.Generator) -> Any:
    """Return the blocks of `weight`; of random numbers where the gguf package cannot round."""
    quant_type = gguf.GGMLQuantizationType[kind]
    try:
        return gguf.quantize(weight, quant_type)
    except NotImplementedError:
        pass
    block_size, block_bytes = gguf.GGML_QUANT_SIZES[quant_type]
    shape = (weight.shape[0], weight.shape[1] // block_size, block_bytes)
    blocks = rng.integers(0, 256, shape, np.uint8)
    for place in _SCALES[kind]:
        scales = rng.uniform(1e-4, 3e-4, shape[:2]).astype(np.float16)
        blocks[..., place : place + 2] = scales[..., None].view(np.uint8)
    return blocks.reshape(shape[0], -1)


def add_metadata(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_eos_token_id(7)


def make_gguf(
    path: Path,
    model_type: str = "llama",
    kind: str = "F32",
    *,
    kinds: dict[str, str] | None = None,
    metadata: dict[str, Any] | None = None,
    rope_factors: list[float] | None = None,
    tokens: list[str] | None = None,
    tokenizer: dict[str, Any] | None = None,
    **config: Any,
) -> tuple[str, str]:
    """Write path/model.gguf, and path/wide: its weights in float32 as safetensors.

    Args:
        kind: the type of all matrices but those whose GGUF name is in `kinds`.
        metadata: fields to add or replace; None as a value leaves one out.
        tokens: special tokens of a byte-level tokenizer; None writes no tokenizer.
        tokenizer: fields of the tokenizer to add or replace.

    Returns:
        The file and the directory, as `LLM` takes them.
    """
    wide = path / "wide"
    wide.mkdir(parents=True)
    hf_config = AutoConfig.for_model(model_type, **{**SIZES, **config})
    tensors = dict(random_model(hf_config).state_dict())
    if hf_config.tie_word_embeddings:
        tensors.pop("lm_head.weight", None)
    writer = gguf.GGUFWriter(path / "model.gguf", model_type)
    add_metadata(writer, hf_config)
    if tokens is not None:
        add_tokenizer(writer, tokens)
    for key, value in {**(metadata or {}), **(tokenizer or {})}.items():
        writer.kv_data[0].pop(key, None)
        if value is not None:
            writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))
    rng = np.random.default_rng(0)
    if rope_factors is not None:
        writer.add_tensor("rope_freqs.weight", np.array(rope_factors, np.float32))
    for name, tensor in tensors.items():
        heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
        head_key = heads.get(name.split(".")[-2]) if model_type == "llama" else None
        num_heads = getattr(hf_config, head_key) if head_key else 0
        theirs = to_llama_order(tensor, num_heads) if num_heads else tensor
        used = (kinds or {}).get(gguf_name(name), kind) if tensor.ndim == 2 else "F32"
        blocks = quantized(theirs.contiguous().numpy(), used, rng)
        quant_type = gguf.GGMLQuantizationType[used]
        writer.add_tensor(gguf_name(name), blocks, raw_dtype=quant_type)
        exact = torch.from_numpy(np.array(gguf.dequantize(blocks, quant_type), np.float32))
        exact = exact.reshape(tensor.shape)
        tensors[name] = from_llama_order(exact, num_heads) if num_heads else exact
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    save_file({name: t.contiguous() for name, t in tensors.items()}, wide / "model.safetensors")
    write_json(wide / "config.json", {**hf_config.to_dict(), "architectures": [_class(model_type)]})
    return str(path / "model.gguf"), str(wide)


def _class(model_type: str) -> str:
    return f"{model_type.capitalize()}ForCausalLM"


def add_tokenizer(writer: gguf.GGUFWriter, tokens: list[str]) -> None:
    """Add a byte-level tokenizer: `tokens`, which are special, then the 256 bytes and two words."""
    from tokenizers.pre_tokenizers import ByteLevel

    alphabet = sorted(ByteLevel.alphabet())
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list([*tokens, *alphabet, "he", "ll"])
    writer.add_token_types([3] * len(tokens) + [1] * (len(alphabet) + 2))
    writer.add_token_merges(["h e", "l l"])
    writer.add_chat_template("{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}")
