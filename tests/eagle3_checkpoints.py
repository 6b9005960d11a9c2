"""Makes EAGLE-3 heads with random parameters in the layouts in which heads are published.

Knows safetensors and the fields of config.json; knows nothing of the engine.
"""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.checkpoints import read_json, write_json

OF_THE_HEAD = (
    "draft_vocab_size",
    "norm_before_residual",
    "norm_before_fc",
    "fc_norm",
    "norm_output",
    "target_hidden_size",
    "eagle_aux_hidden_state_layer_ids",
)
"""Settings that the form of `speculators` keeps beside its transformer_layer_config."""


def make_eagle3_checkpoint(
    path: Path,
    target: str,
    *,
    form: str = "raw",
    prefix: str = "",
    own_embedding: bool = False,
    qk_norm: bool = False,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    **config: Any,
) -> str:
    """Save a random head for the checkpoint `target`.

    Args:
        form: "raw" (SafeAILab, SpecForge, AngelSlim) or "speculators".
        prefix: "model." puts it before the names of all tensors but the head's.
        own_embedding: whether the head has an embedding; else it shares its target's.
        config: settings of the head that differ from `head_settings`; None leaves a setting out.

    Returns:
        `path`, as `speculative_config` takes it.
    """
    settings = {**head_settings(read_json(Path(target) / "config.json")), **config}
    settings = {key: value for key, value in settings.items() if value is not None}
    tensors = random_tensors(settings, own_embedding=own_embedding, qk_norm=qk_norm, seed=seed)
    path.mkdir(parents=True, exist_ok=True)
    saved = {}
    for name, tensor in tensors.items():
        if form == "speculators":
            name = name.replace("midlayer.", "layers.0.")
        if name != "lm_head.weight":
            name = prefix + name
        saved[name] = tensor.to(dtype) if tensor.is_floating_point() else tensor
    save_file(saved, path / "model.safetensors")
    write_json(path / "config.json", settings if form == "raw" else speculators_form(settings))
    return str(path)


def head_settings(target: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a small head for a target with the config `target`.

    Its layer reads the first three features of a shallow target, and its head_dim is its own.
    """
    layer_ids = [0, 1, 2] if target["num_hidden_layers"] < 7 else None
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "vocab_size": target["vocab_size"],
        "draft_vocab_size": target["vocab_size"] // 3,
        "hidden_size": target["hidden_size"],
        "intermediate_size": 96,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "hidden_act": "silu",
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
        "rope_scaling": None,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": "float16",
        "eagle_aux_hidden_state_layer_ids": layer_ids,
    }


def speculators_form(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the nested config of the `speculators` library for flat `settings`."""
    layer = {key: value for key, value in settings.items() if key not in OF_THE_HEAD}
    layer.pop("architectures")
    return {
        "architectures": ["Eagle3Speculator"],
        "model_type": "speculators",
        "speculators_model_type": "eagle3",
        "speculators_version": "0.2.0",
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 5}],
            "verifier": {"architectures": ["Qwen3ForCausalLM"], "name_or_path": "target"},
        },
        "transformer_layer_config": layer,
        "norm_before_residual": False,
        "target_hidden_size": None,
        "embed_requires_grad": False,
        **{key: settings[key] for key in OF_THE_HEAD if key in settings},
    }


def random_tensors(
    settings: dict[str, Any], *, own_embedding: bool, qk_norm: bool, seed: int
) -> dict[str, torch.Tensor]:
    """Return a head's tensors by the names of the authors' checkpoints."""
    hidden, vocab = settings["hidden_size"], settings["vocab_size"]
    draft_vocab = settings.get("draft_vocab_size", vocab)
    features = settings.get("target_hidden_size", hidden)
    heads, kv_heads = settings["num_attention_heads"], settings["num_key_value_heads"]
    head_dim = settings.get("head_dim", hidden // heads)
    inner, layer = settings["intermediate_size"], "midlayer."
    outputs = {
        "self_attn.q_proj": (heads * head_dim, 2 * hidden, "attention_bias"),
        "self_attn.k_proj": (kv_heads * head_dim, 2 * hidden, "attention_bias"),
        "self_attn.v_proj": (kv_heads * head_dim, 2 * hidden, "attention_bias"),
        "self_attn.o_proj": (hidden, heads * head_dim, "attention_bias"),
        "mlp.gate_proj": (inner, hidden, "mlp_bias"),
        "mlp.up_proj": (inner, hidden, "mlp_bias"),
        "mlp.down_proj": (hidden, inner, "mlp_bias"),
    }
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, 3 * features),
        "norm.weight": (hidden,),
        "lm_head.weight": (draft_vocab, hidden),
        layer + "hidden_norm.weight": (hidden,),
        layer + "input_layernorm.weight": (hidden,),
        layer + "post_attention_layernorm.weight": (hidden,),
    }
    for name, (rows, columns, bias) in outputs.items():
        shapes[f"{layer}{name}.weight"] = (rows, columns)
        if settings.get(bias):
            shapes[f"{layer}{name}.bias"] = (rows,)
    if own_embedding:
        shapes["embed_tokens.weight"] = (vocab, hidden)
    if qk_norm:
        shapes[layer + "self_attn.q_norm.weight"] = (head_dim,)
        shapes[layer + "self_attn.k_norm.weight"] = (head_dim,)
    if settings.get("norm_before_fc"):
        shapes["input_norm.weight"] = (3 * features,)
    if settings.get("fc_norm"):
        shapes.update({f"fc_norm.{index}.weight": (features,) for index in range(3)})
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in shapes.items():
        noise = torch.randn(shape, generator=generator)
        if len(shape) == 2:
            tensors[name] = noise * 1.5 / shape[1] ** 0.5
        else:
            tensors[name] = 0.7 * noise if name.endswith("bias") else 1.5 + 0.5 * noise
    if draft_vocab < vocab:
        tokens = torch.randperm(vocab, generator=generator)[:draft_vocab].sort().values
        tensors["d2t"] = tokens - torch.arange(draft_vocab)
        tensors["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill_(0, tokens, True)
    return tensors


def change_tensors(path: str | Path, **changes: Any) -> None:
    """Replace tensors of a saved head; None removes one. A "__" in a keyword is a "." of a name."""
    file = Path(path) / "model.safetensors"
    tensors = load_file(file)
    for key, value in changes.items():
        name = key.replace("__", ".")
        if value is None:
            del tensors[name]
        else:
            tensors[name] = value
    save_file(tensors, file)
