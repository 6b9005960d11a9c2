"""Writes a GGUF file with random weights, so that engines that read GGUF can be compared without a
download. All layers get the same weights, because an engine's speed does not depend on them.
"""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np


def write_random_gguf(path: Path, config: Mapping[str, Any], kind: str) -> None:
    """Write a file that has no tokenizer.

    Args:
        config: a config.json of model_type qwen3 or llama with tied embeddings. A scaling of the
            rotary embedding is left out.
        kind: the matrices' type, such as "BF16", "Q8_0" or "Q4_0"; norms are float32.
    """
    family = config["model_type"]
    if family not in ("qwen3", "llama") or not config["tie_word_embeddings"]:
        sys.exit("a random GGUF file has the shape of a Qwen3 or a Llama with tied embeddings")
    quant_type = gguf.GGMLQuantizationType[kind]
    rng = np.random.default_rng(0)
    hidden, inner, head_dim = (
        config["hidden_size"],
        config["intermediate_size"],
        config["head_dim"],
    )
    queries = config["num_attention_heads"] * head_dim
    keys = config["num_key_value_heads"] * head_dim
    shapes = {
        "attn_q": (queries, hidden),
        "attn_k": (keys, hidden),
        "attn_v": (keys, hidden),
        "attn_output": (hidden, queries),
        "ffn_gate": (inner, hidden),
        "ffn_up": (inner, hidden),
        "ffn_down": (hidden, inner),
    }
    norms = {"attn_norm": hidden, "ffn_norm": hidden}
    if family == "qwen3":
        norms |= {"attn_q_norm": head_dim, "attn_k_norm": head_dim}

    def matrix(rows: int, columns: int) -> np.ndarray[Any, Any]:
        numbers = rng.standard_normal((rows, columns), np.float32)
        blocks: np.ndarray[Any, Any] = gguf.quantize(0.02 * numbers, quant_type)
        return blocks

    matrices = {name: matrix(*shape) for name, shape in shapes.items()}
    writer = gguf.GGUFWriter(path, family)
    _add_metadata(writer, config)
    writer.add_tensor(
        "token_embd.weight", matrix(config["vocab_size"], hidden), raw_dtype=quant_type
    )
    for layer in range(config["num_hidden_layers"]):
        for name, blocks in matrices.items():
            writer.add_tensor(f"blk.{layer}.{name}.weight", blocks, raw_dtype=quant_type)
        for name, width in norms.items():
            writer.add_tensor(f"blk.{layer}.{name}.weight", np.ones(width, np.float32))
    writer.add_tensor("output_norm.weight", np.ones(hidden, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_metadata(writer: gguf.GGUFWriter, config: Mapping[str, Any]) -> None:
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    writer.add_eos_token_id(config.get("eos_token_id", 0))
