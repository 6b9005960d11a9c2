"""The EAGLE-3 head of the demo model (arXiv 2503.01840): its modules and its training.

Its checkpoint has the layout of published heads: one decoder layer, `midlayer`, whose attention
reads the embedding of a token next to a hidden state, and a head over the most frequent tokens.
The head shares the target's embedding.
"""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, save
from torch import nn
from torch.nn.functional import pad, silu
from transformers import Qwen3ForCausalLM

from tools.demo_model.checkpoint import MODEL_CONFIG, write_json
from tools.demo_model.draft import cross_entropy_at_temperatures, drafted
from tools.demo_model.train import IGNORED_LABEL, Examples, Schedule, optimize

HIDDEN = MODEL_CONFIG["hidden_size"]
HEADS = MODEL_CONFIG["num_attention_heads"]
KV_HEADS = MODEL_CONFIG["num_key_value_heads"]
HEAD_DIM = MODEL_CONFIG["head_dim"]
EPS = MODEL_CONFIG["rms_norm_eps"]
ROPE_THETA = MODEL_CONFIG["rope_theta"]
INTERMEDIATE = 256
DRAFT_VOCAB = 704
FEATURE_LAYERS = (1, 2, 3)
"""The target's layers whose inputs the head reads."""

STEPS = 5
"""Tokens drafted in a row in training: from the second on, the head reads its own output."""
DECAY = 0.8
"""Weight of a step's loss relative to the step before: a token is useful only after the others."""
COUNTED_BATCHES = 1000

Cache = list[tuple[torch.Tensor, torch.Tensor]]
"""Keys and values of the steps so far, each [n, kv heads, rows, head_dim]."""


def eagle3_config(target: Qwen3ForCausalLM) -> dict[str, Any]:
    """Return the content of config.json."""
    same = (
        "vocab_size hidden_size num_attention_heads num_key_value_heads head_dim hidden_act "
        "max_position_embeddings rms_norm_eps rope_theta rope_scaling attention_bias "
        "attention_dropout initializer_range use_cache"
    )
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        **{name: MODEL_CONFIG[name] for name in same.split()},
        "num_hidden_layers": 1,
        "intermediate_size": INTERMEDIATE,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "draft_vocab_size": DRAFT_VOCAB,
        "eagle_config": {
            # In `eagle_config` a layer stands for what leaves it.
            "eagle_aux_hidden_state_layer_ids": [layer - 1 for layer in FEATURE_LAYERS],
            "use_aux_hidden_state": True,
        },
        "bos_token_id": target.config.bos_token_id,
        "eos_token_id": target.config.eos_token_id,
        "pad_token_id": target.config.pad_token_id,
        "torch_dtype": "bfloat16",
    }


def rotate(states: torch.Tensor, first: int) -> torch.Tensor:
    """Apply rotary position embedding to [n, heads, rows, head_dim]; rows begin at `first`."""
    half = HEAD_DIM // 2
    frequencies = ROPE_THETA ** (-torch.arange(half) / half)
    angles = (first + torch.arange(states.size(2)))[:, None] * frequencies
    cos, sin = angles.cos(), angles.sin()
    left, right = states[..., :half], states[..., half:]
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)


class Attention(nn.Module):
    """Attention of rows that each draft `step` tokens ahead of what the target has computed."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(2 * HIDDEN, HEADS * HEAD_DIM, bias=False)
        self.k_proj = nn.Linear(2 * HIDDEN, KV_HEADS * HEAD_DIM, bias=False)
        self.v_proj = nn.Linear(2 * HIDDEN, KV_HEADS * HEAD_DIM, bias=False)
        self.o_proj = nn.Linear(HEADS * HEAD_DIM, HIDDEN, bias=False)

    def forward(self, states: torch.Tensor, cache: Cache) -> torch.Tensor:
        """Attend, and append the step's keys and values to `cache`.

        Row i is at position i + step. It sees the first step's rows up to i, which come from the
        target's hidden states, and its own rows of the steps since then.
        """
        step = len(cache)
        query, key, value = (
            projection(states).unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        query, key = rotate(query, step), rotate(key, step)
        group = HEADS // KV_HEADS
        cache.append((key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)))
        keys, values = cache[0]
        rows = query.size(2)
        future = torch.ones(rows, rows, dtype=torch.bool).triu(1)
        scores = (query @ keys.transpose(2, 3)).masked_fill(future, -torch.inf)
        own = [(query * own_key).sum(-1, keepdim=True) for own_key, _ in cache[1:]]
        weights = (torch.cat([scores, *own], dim=-1) / HEAD_DIM**0.5).softmax(dim=-1)
        mixed = weights[..., :rows] @ values
        for index, (_, own_value) in enumerate(cache[1:]):
            mixed = mixed + weights[..., rows + index, None] * own_value
        output: torch.Tensor = self.o_proj(mixed.transpose(1, 2).flatten(2))
        return output


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(HIDDEN, INTERMEDIATE, bias=False)
        self.up_proj = nn.Linear(HIDDEN, INTERMEDIATE, bias=False)
        self.down_proj = nn.Linear(INTERMEDIATE, HIDDEN, bias=False)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.down_proj(silu(self.gate_proj(states)) * self.up_proj(states))
        return output


class Midlayer(nn.Module):
    """The decoder layer. What it returns is the `hidden` of the next step."""

    def __init__(self) -> None:
        super().__init__()
        self.self_attn = Attention()
        self.mlp = MLP()
        self.hidden_norm = nn.RMSNorm(HIDDEN, EPS)
        self.input_layernorm = nn.RMSNorm(HIDDEN, EPS)
        self.post_attention_layernorm = nn.RMSNorm(HIDDEN, EPS)

    def forward(self, embedded: torch.Tensor, hidden: torch.Tensor, cache: Cache) -> torch.Tensor:
        both = torch.cat((self.input_layernorm(embedded), self.hidden_norm(hidden)), dim=-1)
        hidden = hidden + self.self_attn(both, cache)
        output: torch.Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return output


class Eagle3Head(nn.Module):
    """The head; its parameters and buffers have the published names.

    Args:
        tokens: The target's tokens that the head can draft, ascending: [DRAFT_VOCAB].
    """

    d2t: torch.Tensor
    t2d: torch.Tensor

    def __init__(self, tokens: torch.Tensor) -> None:
        super().__init__()
        self.fc = nn.Linear(len(FEATURE_LAYERS) * HIDDEN, HIDDEN, bias=False)
        self.midlayer = Midlayer()
        self.norm = nn.RMSNorm(HIDDEN, EPS)
        self.lm_head = nn.Linear(HIDDEN, DRAFT_VOCAB, bias=False)
        self.register_buffer("d2t", tokens - torch.arange(DRAFT_VOCAB))
        known = torch.zeros(MODEL_CONFIG["vocab_size"], dtype=torch.bool)
        self.register_buffer("t2d", known.index_fill(0, tokens, True))

    @property
    def tokens(self) -> torch.Tensor:
        return self.d2t + torch.arange(DRAFT_VOCAB)

    def unroll(
        self, target: Qwen3ForCausalLM, inputs: torch.Tensor, features: torch.Tensor, steps: int
    ) -> Iterator[torch.Tensor]:
        """Draft from every token of `inputs` on, as if all drafts were accepted.

        Args:
            target: Whose embedding the head shares.
            inputs: [n, length].
            features: The hidden states of `FEATURE_LAYERS`: [n, length, 3 * hidden].
            steps: Tokens to draft in a row.

        Yields:
            For each step s = 0, 1, ... the head's output before its norm: [n, length, hidden]. Row
            i has seen the tokens up to i + 1 + s and drafts token i + 2 + s. Rows for which
            `inputs` is too short are meaningless.
        """
        hidden = self.fc(features)
        cache: Cache = []
        for step in range(steps):
            embedded = target.model.embed_tokens(shifted(inputs, 1 + step))
            hidden = self.midlayer(embedded, hidden, cache)
            yield hidden


def shifted(tensor: torch.Tensor, number: int) -> torch.Tensor:
    """Return [n, length, ...] with what is `number` positions on, and zeros after the end."""
    behind = (0, 0) * (tensor.ndim - 2)
    return pad(tensor[:, number:], (*behind, 0, min(number, tensor.size(1))))


@torch.no_grad()
def read_target(
    target: Qwen3ForCausalLM, inputs: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the hidden states that enter `FEATURE_LAYERS`, and the logits."""
    states = target.model(input_ids=inputs, output_hidden_states=True)
    features = torch.cat([states.hidden_states[layer] for layer in FEATURE_LAYERS], dim=-1)
    return features, target.lm_head(states.last_hidden_state)


def frequent_tokens(examples: Examples) -> torch.Tensor:
    """Return the `DRAFT_VOCAB` most frequent tokens of replies, ascending."""
    counts: Counter[int] = Counter()
    for _ in range(COUNTED_BATCHES):
        _, labels = examples.batch()
        counts.update(labels[labels != IGNORED_LABEL].tolist())
    return torch.tensor(sorted(token for token, _ in counts.most_common(DRAFT_VOCAB)))


def test_time_loss(
    head: Eagle3Head, target: Qwen3ForCausalLM, inputs: torch.Tensor, labels: torch.Tensor
) -> torch.Tensor:
    """Return the weighted mean over steps of the cross-entropy with the target.

    The target's distribution is restricted to the head's tokens. Where its best token is not among
    them, nothing is learned.
    """
    features, logits = read_target(target, inputs)
    wanted = logits[..., head.tokens]
    can_draft = head.t2d[logits.argmax(dim=-1)]
    learned = shifted(pad(drafted(labels), (0, 1)), 1)
    total = torch.zeros(())
    for step, hidden in enumerate(head.unroll(target, inputs, features, STEPS)):
        if step > 0:
            learned = learned & shifted(learned, 1)
        rows = learned & shifted(can_draft, 1 + step)
        if not rows.any():
            break
        drafts = head.lm_head(head.norm(hidden[rows]))
        loss = cross_entropy_at_temperatures(drafts, shifted(wanted, 1 + step)[rows])
        total = total + DECAY**step * loss
    return total / sum(DECAY**step for step in range(STEPS))


def train_eagle3(
    target: Qwen3ForCausalLM, examples: Examples, schedule: Schedule, out: Path
) -> None:
    """Train a head for `target`, and write its checkpoint to `out`."""
    head = Eagle3Head(frequent_tokens(examples))
    with torch.no_grad():
        head.lm_head.weight.copy_(target.model.embed_tokens.weight[head.tokens])
        head.norm.weight.copy_(target.model.norm.weight)
    layers = nn.ModuleList([head.fc, head.midlayer])
    optimize(head, layers, lambda: test_time_loss(head, target, *examples.batch()), schedule)
    write_json(out / "config.json", eagle3_config(target))
    tensors = {
        name: (tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor).contiguous()
        for name, tensor in head.state_dict().items()
    }
    (out / "model.safetensors").write_bytes(save(tensors, metadata={"format": "pt"}))


def read_eagle3(path: Path) -> Eagle3Head:
    """Return the head that `train_eagle3` wrote to `path`."""
    tensors = load((path / "model.safetensors").read_bytes())
    head = Eagle3Head(tensors["d2t"] + torch.arange(DRAFT_VOCAB))
    head.load_state_dict(tensors)
    return head
