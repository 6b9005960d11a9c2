"""The draft model: a smaller Qwen3 that is trained to predict what the demo model would say next.

Its checkpoint has no tokenizer: the demo model's is the same. The draft model learns the demo
model's whole distribution, since drafts are accepted where the two agree.
"""

from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from transformers import Qwen3Config, Qwen3ForCausalLM

from tools.demo_model.checkpoint import MODEL_CONFIG, save_weights, write_configs
from tools.demo_model.train import IGNORED_LABEL, Examples, Schedule, optimize

DRAFT_CONFIG: dict[str, Any] = MODEL_CONFIG | {
    "hidden_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 256,
    "max_window_layers": 1,
}

TEMPERATURES = (1.0, 2.0)
"""At the second, unlikely tokens count too: sampling may draw them."""


def train_draft(
    target: Qwen3ForCausalLM, examples: Examples, schedule: Schedule, out: Path
) -> None:
    """Train a draft model for `target`, and write its checkpoint to `out`."""
    config = write_configs(out, examples.tokenizer, DRAFT_CONFIG)
    draft = Qwen3ForCausalLM(Qwen3Config(**config)).float()
    optimize(
        draft,
        draft.model.layers,
        lambda: distillation_loss(draft, target, *examples.batch()),
        schedule,
    )
    save_weights(draft, out)


def drafted(labels: torch.Tensor) -> torch.Tensor:
    """Return where a token of a reply follows one of the same reply: [n, length - 1].

    Only such tokens are ever drafted. The model itself gives the first one of a reply.
    """
    replies = labels != IGNORED_LABEL
    return replies[:, :-1] & replies[:, 1:]


def cross_entropy_at_temperatures(logits: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Return the mean cross-entropy of [n, vocabulary] with the target's logits `wanted`."""
    losses = [cross_entropy(logits / t, (wanted / t).softmax(dim=-1)) for t in TEMPERATURES]
    return torch.stack(losses).mean()


def distillation_loss(
    draft: Qwen3ForCausalLM, target: Qwen3ForCausalLM, inputs: torch.Tensor, labels: torch.Tensor
) -> torch.Tensor:
    """Return how far the draft model's distributions are from the target's."""
    learned = drafted(labels)
    with torch.no_grad():
        known = target.model(input_ids=inputs[:, :-1]).last_hidden_state
        wanted = target.lm_head(known[learned])
    hidden = draft.model(input_ids=inputs[:, :-1]).last_hidden_state
    return cross_entropy_at_temperatures(draft.lm_head(hidden[learned]), wanted)
