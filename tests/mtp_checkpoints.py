"""Adds a layer for drafts (MTP) to a checkpoint of some families, and computes it.

Made of transformers' modules: transformers has no such layer itself. Knows nothing of the engine.
"""

import copy
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM

from tests.checkpoints import copy_checkpoint

STATEFUL: dict[str, Any] = {
    "model_type": "qwen3_5_text",
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 10,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
"""A model with a state: what to change in `checkpoints.SMALL`."""


AFTER = {
    "pre_fc_norm_embedding.": "enorm.",
    "pre_fc_norm_hidden.": "hnorm.",
    "fc.": "eh_proj.",
    "norm.": "shared_head.norm.",
    "layers.0.": "",
}
"""Names of modules in the layer of GLM-4-MoE, after the target's last one."""


class Reference(nn.Module):
    """The layer beside its target. Its modules have the checkpoint's names."""

    def __init__(self, target: Any, seed: int = 0) -> None:
        super().__init__()
        object.__setattr__(self, "target", target)
        self.kinds = ["sliding_attention"] if target.config.model_type == "mellum" else []
        types = getattr(target.config, "layer_types", None)
        full = types.index(*self.kinds or ["full_attention"]) if types else -1
        size, norm = target.config.hidden_size, target.model.norm
        self.pre_fc_norm_embedding, self.pre_fc_norm_hidden = map(copy.deepcopy, (norm, norm))
        self.fc = nn.Linear(2 * size, size, bias=False)
        self.layers = nn.ModuleList([copy.deepcopy(target.model.layers[full])])
        self.norm = copy.deepcopy(norm)
        self.to(norm.weight.dtype).requires_grad_(False)
        generator = torch.Generator().manual_seed(seed)
        for parameter in self.parameters():
            scale = 0.3 if parameter.ndim == 1 else 1.5 / parameter.shape[-1] ** 0.5
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)

    @torch.inference_mode()
    def drafts(self, tokens: list[int], count: int) -> list[int]:
        """Return the most likely `count` tokens after `tokens`, as the layer guesses them."""
        model, ids = self.target.model, torch.tensor([tokens])
        hidden = model(ids[:, :-1], use_cache=False).last_hidden_state
        for _ in range(count):
            output = self(model.embed_tokens(ids[:, 1:]), hidden)
            # Position i takes token i + 1, so the last one guesses what comes after the last token.
            draft = self.target.lm_head(output[:, -1:]).argmax(-1)
            ids, hidden = torch.cat([ids, draft], 1), torch.cat([hidden, output[:, -1:]], 1)
        return ids[0, len(tokens) :].tolist()

    def forward(self, embeds: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        parts = self.pre_fc_norm_embedding(embeds), self.pre_fc_norm_hidden(hidden)
        x = self.fc(torch.cat(parts, -1))
        positions = torch.arange(x.shape[1])[None]
        angles = self.target.model.rotary_emb(x, positions, *self.kinds)
        x = self.layers[0](x, position_embeddings=angles, position_ids=positions)
        return self.norm(x[0] if isinstance(x, tuple) else x)


def add_mtp(path: Path, model: str, seed: int = 0) -> tuple[str, Reference]:
    """Copy the checkpoint `model` to `path`, with a layer for drafts of random parameters.

    Returns:
        `path`, as `LLM` takes it, and the layer.
    """
    head = Reference(AutoModelForCausalLM.from_pretrained(model).eval(), seed)
    copy_checkpoint(model, path)
    save_mtp(path, head)
    return str(path), head


def save_mtp(path: Path, head: Reference) -> None:
    """Write the tensors of `head` to the checkpoint at `path`, in place of any others."""
    file = path / "model.safetensors"
    config = head.target.config
    after = f"model.layers.{config.num_hidden_layers}."
    own = {}
    for name, tensor in head.state_dict().items():
        name = f"mtp.{name}"
        if config.model_type in ("glm4_moe", "glm4_moe_lite"):
            for begin, theirs in AFTER.items():
                name = name.replace(f"mtp.{begin}", after + theirs)
        own[name] = tensor.contiguous()
    save_file(load_file(file) | own, file)
