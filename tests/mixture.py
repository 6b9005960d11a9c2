"""A made-up model that mixes all kinds of layers: full and latent attention, windows, two states.

Its weights are random. `logits` is what it computes, in float64 and over a whole sequence: plain
torch that shares no code with the engine.
"""

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from nanovllm.attention.spec import AttentionOptions
from nanovllm.layers.state_layer import ShortConv
from nanovllm.models import registry
from nanovllm.models.decoder import DecoderForCausalLM, DecoderLayer, GatedMLP, SelfAttention
from nanovllm.models.hybrid_parts import delta_net
from nanovllm.models.mla_parts import LatentAttention
from nanovllm.models.model_config import ModelConfig
from tests.checkpoints import write_json

NAME = "MixtureForCausalLM"
CONV = "conv"
DELTA = "delta"
FULL = "full"
LATENT = "latent"
LAYERS: list[str | int] = [CONV, 8, LATENT, DELTA, FULL, 8, 40]
"""What each layer has; a number is a window in tokens."""
TAPS = 3
HEADS = 4
KV_HEADS = 2
HEAD_DIM = 32
HIDDEN = 64
LATENT_DIM = 32
NOPE = 32
ROPE = 8
"""With LATENT_DIM no multiple of 32, as the layout of the C kernels has it: it is padded."""
VALUE_DIM = 32
MLP = 96
KEY_HEADS = 2
VALUE_HEADS = 4
DELTA_DIM = 32
DELTA_TAPS = 4
VOCAB = 1003
EPS = 1e-6
THETA = 1e4
CONFIG: dict[str, Any] = {
    "architectures": [NAME],
    "model_type": "mixture",
    "mixers": LAYERS,
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": MLP,
    "num_hidden_layers": len(LAYERS),
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "max_position_embeddings": 256,
    "rms_norm_eps": EPS,
    "rope_theta": THETA,
    "tie_word_embeddings": False,
    "eos_token_id": [7, 11],
    "kv_lora_rank": LATENT_DIM,
    "qk_nope_head_dim": NOPE,
    "qk_rope_head_dim": ROPE,
    "v_head_dim": VALUE_DIM,
    "linear_num_key_heads": KEY_HEADS,
    "linear_num_value_heads": VALUE_HEADS,
    "linear_key_head_dim": DELTA_DIM,
    "linear_value_head_dim": DELTA_DIM,
    "linear_conv_kernel_dim": DELTA_TAPS,
}

Weights = Mapping[str, torch.Tensor]


class MixtureForCausalLM(DecoderForCausalLM):
    """Nothing: layers of each kind."""

    def make_layer(self, config: ModelConfig, index: int) -> DecoderLayer:
        kind = config.fields["mixers"][index]
        mlp = GatedMLP(config)
        if kind == CONV:
            return DecoderLayer(config, ShortConv(config.hidden_size, TAPS, bias=False), mlp)
        if kind == DELTA:
            return DecoderLayer(config, delta_net(config), mlp)
        if kind == LATENT:
            config = dataclasses.replace(config, num_kv_heads=HEADS)
            rotary = self.rotary_emb(config.rope, ROPE)
            return DecoderLayer(config, LatentAttention(config, rotary), mlp)
        rotary = self.rotary_emb(config.rope, config.head_dim)
        options = AttentionOptions(window=None if kind == FULL else kind)
        mixer = SelfAttention(config, rotary, qk_norm=True, options=options)
        return DecoderLayer(config, mixer, mlp)


@contextlib.contextmanager
def registered() -> Iterator[None]:
    """Have engines know the architecture inside."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "installed", lambda kind: {NAME: f"tests.mixture:{NAME}"})
        yield


def make_weights(seed: int = 0) -> dict[str, torch.Tensor]:
    """Return random weights in float32, by their names in a checkpoint."""
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCAB, HIDDEN),
        "model.norm.weight": (HIDDEN,),
        "lm_head.weight": (VOCAB, HIDDEN),
    }
    keys = KEY_HEADS * DELTA_DIM
    values = VALUE_HEADS * DELTA_DIM
    mixers: dict[str | int, dict[str, tuple[int, ...]]] = {
        CONV: {
            "in_proj.weight": (3 * HIDDEN, HIDDEN),
            "conv.weight": (HIDDEN, 1, TAPS),
            "out_proj.weight": (HIDDEN, HIDDEN),
        },
        DELTA: {
            "in_proj_qkv.weight": (2 * keys + values, HIDDEN),
            "in_proj_z.weight": (values, HIDDEN),
            "in_proj_a.weight": (VALUE_HEADS, HIDDEN),
            "in_proj_b.weight": (VALUE_HEADS, HIDDEN),
            "conv1d.weight": (2 * keys + values, 1, DELTA_TAPS),
            "A_log": (VALUE_HEADS,),
            "dt_bias": (VALUE_HEADS,),
            "norm.weight": (DELTA_DIM,),
            "out_proj.weight": (HIDDEN, values),
        },
        LATENT: {
            "q_proj.weight": (HEADS * (NOPE + ROPE), HIDDEN),
            "kv_a_proj_with_mqa.weight": (LATENT_DIM + ROPE, HIDDEN),
            "kv_a_layernorm.weight": (LATENT_DIM,),
            "kv_b_proj.weight": (HEADS * (NOPE + VALUE_DIM), LATENT_DIM),
            "o_proj.weight": (HIDDEN, HEADS * VALUE_DIM),
        },
        FULL: {
            "q_proj.weight": (HEADS * HEAD_DIM, HIDDEN),
            "k_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
            "v_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
            "o_proj.weight": (HIDDEN, HEADS * HEAD_DIM),
            "q_norm.weight": (HEAD_DIM,),
            "k_norm.weight": (HEAD_DIM,),
        },
    }
    for index, kind in enumerate(LAYERS):
        layer = f"model.layers.{index}"
        for name, shape in mixers[FULL if isinstance(kind, int) else kind].items():
            shapes[f"{layer}.self_attn.{name}"] = shape
        shapes[f"{layer}.input_layernorm.weight"] = (HIDDEN,)
        shapes[f"{layer}.post_attention_layernorm.weight"] = (HIDDEN,)
        shapes[f"{layer}.mlp.gate_proj.weight"] = (MLP, HIDDEN)
        shapes[f"{layer}.mlp.up_proj.weight"] = (MLP, HIDDEN)
        shapes[f"{layer}.mlp.down_proj.weight"] = (HIDDEN, MLP)
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for name, shape in shapes.items():
        noise = torch.randn(shape, generator=generator)
        if name.endswith("norm.weight"):
            found[name] = 1.0 + 0.3 * noise
        elif len(shape) == 1:  # A_log and dt_bias
            found[name] = noise - 1.0
        else:
            found[name] = noise * 1.5 / shape[-1] ** 0.5
    return found


def make_checkpoint(path: Path, dtype: str = "float32") -> str:
    """Write a checkpoint of random weights; return `path`."""
    weights = {name: each.to(getattr(torch, dtype)) for name, each in make_weights().items()}
    path.mkdir(parents=True, exist_ok=True)
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    write_json(path / "config.json", {**CONFIG, "dtype": dtype})
    return str(path)


def read_weights(model: str) -> Weights:
    """Return the weights of a checkpoint in float64."""
    found = load_file(Path(model) / "model.safetensors")
    return {name: weight.double() for name, weight in found.items()}


def logits(weights: Weights, tokens: list[int]) -> torch.Tensor:
    """Return the logits [len(tokens), VOCAB] float64 of a whole sequence."""
    hidden = weights["model.embed_tokens.weight"][tokens]
    for index, kind in enumerate(LAYERS):
        prefix = f"model.layers.{index}."
        layer = {k.removeprefix(prefix): w for k, w in weights.items() if k.startswith(prefix)}
        mixer = {
            name.removeprefix("self_attn."): weight
            for name, weight in layer.items()
            if name.startswith("self_attn.")
        }
        x = _norm(hidden, layer["input_layernorm.weight"])
        if kind == CONV:
            hidden = hidden + _short_conv(mixer, x)
        elif kind == DELTA:
            hidden = hidden + _delta_net(mixer, x)
        elif kind == LATENT:
            hidden = hidden + _latent_attention(mixer, x)
        else:
            hidden = hidden + _attention(mixer, x, None if kind == FULL else int(kind))
        x = _norm(hidden, layer["post_attention_layernorm.weight"])
        gate = torch.nn.functional.silu(x @ layer["mlp.gate_proj.weight"].T)
        up = x @ layer["mlp.up_proj.weight"].T
        hidden = hidden + (gate * up) @ layer["mlp.down_proj.weight"].T
    return _norm(hidden, weights["model.norm.weight"]) @ weights["lm_head.weight"].T


def _norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * weight


def _causal_conv(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return the depthwise convolution of x [T, channels]; the last tap is the token's own."""
    taps = weight.shape[-1]
    padded = torch.cat([x.new_zeros(taps - 1, x.shape[1]), x])
    return sum(padded[tap : tap + len(x)] * weight[:, 0, tap] for tap in range(taps))  # type: ignore[return-value]


def _short_conv(mixer: Weights, x: torch.Tensor) -> torch.Tensor:
    before, after, inner = (x @ mixer["in_proj.weight"].T).chunk(3, dim=1)
    mixed = _causal_conv(before * inner, mixer["conv.weight"])
    return (after * mixed) @ mixer["out_proj.weight"].T


def _delta_net(mixer: Weights, x: torch.Tensor) -> torch.Tensor:
    qkv = torch.nn.functional.silu(
        _causal_conv(x @ mixer["in_proj_qkv.weight"].T, mixer["conv1d.weight"])
    )
    sizes = [KEY_HEADS * DELTA_DIM, KEY_HEADS * DELTA_DIM, VALUE_HEADS * DELTA_DIM]
    q, k, v = (part.view(len(x), -1, DELTA_DIM) for part in qkv.split(sizes, dim=1))
    share = VALUE_HEADS // KEY_HEADS
    q, k = (
        (y * (y.square().sum(-1, keepdim=True) + 1e-6).rsqrt()).repeat_interleave(share, dim=1)
        for y in (q, k)
    )
    beta = (x @ mixer["in_proj_b.weight"].T).sigmoid()
    speed = torch.nn.functional.softplus(x @ mixer["in_proj_a.weight"].T + mixer["dt_bias"])
    decay = (-mixer["A_log"].exp() * speed).exp()
    state = x.new_zeros(VALUE_HEADS, DELTA_DIM, DELTA_DIM)
    heads = []
    for token in range(len(x)):
        state = state * decay[token, :, None, None]
        known = torch.einsum("hkv,hk->hv", state, k[token])
        change = (v[token] - known) * beta[token, :, None]
        state = state + torch.einsum("hk,hv->hkv", k[token], change)
        heads.append(torch.einsum("hkv,hk->hv", state, q[token] * DELTA_DIM**-0.5))
    z = (x @ mixer["in_proj_z.weight"].T).view(len(x), VALUE_HEADS, DELTA_DIM)
    out = _norm(torch.stack(heads), mixer["norm.weight"]) * torch.nn.functional.silu(z)
    return out.flatten(1) @ mixer["out_proj.weight"].T


def _attention(mixer: Weights, x: torch.Tensor, window: int | None) -> torch.Tensor:
    q, k, v = (
        (x @ mixer[f"{name}_proj.weight"].T).view(len(x), -1, HEAD_DIM) for name in ("q", "k", "v")
    )
    q = _rotate(_norm(q, mixer["q_norm.weight"]))
    k = _rotate(_norm(k, mixer["k_norm.weight"])).repeat_interleave(HEADS // KV_HEADS, dim=1)
    v = v.repeat_interleave(HEADS // KV_HEADS, dim=1)
    return _attend(q, k, v, window) @ mixer["o_proj.weight"].T


def _latent_attention(mixer: Weights, x: torch.Tensor) -> torch.Tensor:
    q = (x @ mixer["q_proj.weight"].T).view(len(x), HEADS, NOPE + ROPE)
    latent, rotated = (x @ mixer["kv_a_proj_with_mqa.weight"].T).split([LATENT_DIM, ROPE], dim=1)
    kv = _norm(latent, mixer["kv_a_layernorm.weight"]) @ mixer["kv_b_proj.weight"].T
    k, v = kv.view(len(x), HEADS, -1).split([NOPE, VALUE_DIM], dim=2)
    rotated = _rotate(rotated[:, None]).expand(-1, HEADS, -1)
    q = torch.cat([q[..., :NOPE], _rotate(q[..., NOPE:])], dim=2)
    return _attend(q, torch.cat([k, rotated], dim=2), v, None) @ mixer["o_proj.weight"].T


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int | None) -> torch.Tensor:
    """Return the heads of all tokens side by side, for q, k and v [T, HEADS, any]."""
    scores = torch.einsum("qhd,khd->hqk", q, k) * q.shape[2] ** -0.5
    positions = torch.arange(len(q))
    distance = positions[:, None] - positions
    hidden_keys = distance < 0
    if window is not None:
        hidden_keys |= distance >= window
    scores = scores.masked_fill(hidden_keys, -torch.inf)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1)


def _rotate(x: torch.Tensor) -> torch.Tensor:
    """Return the heads [T, heads, any], rotated by their positions."""
    half = x.shape[2] // 2
    angles = torch.arange(len(x)).double()[:, None] * THETA ** (-torch.arange(half).double() / half)
    cos = angles.cos()[:, None]
    sin = angles.sin()[:, None]
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
