"""The drafting layer of a checkpoint that was trained to predict several tokens at once (MTP).

Position i takes the embedding of token i + 1 and the target's last hidden state of position i, and
drafts token i + 2. After the last hidden states it continues with its own output in their place.
"""

from collections.abc import Callable, Collection

import torch
from torch import nn

from nanovllm.attention.batch import Batch
from nanovllm.features.speculation.proposers.head import Head, capture_output
from nanovllm.features.speculation.proposers.mtp_config import PREFIX, MTPConfig
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.linear import LinearBase
from nanovllm.models.decoder import DecoderForCausalLM, DecoderLayer, Family
from nanovllm.models.expert_parts import expect_stored
from nanovllm.models.parts import OTHER_MODALITIES
from nanovllm.models.registry import family_class


class MTPParts(nn.Module):
    """The modules with separate weights.

    Args:
        layer: with full attention, as the target's family has it.
        norm: options of the norms, see `RMSNorm`.
    """

    def __init__(self, config: MTPConfig, layer: DecoderLayer, **norm: int) -> None:
        super().__init__()
        size = config.hidden_size
        eps = config.rms_norm_eps
        self.pre_fc_norm_embedding = RMSNorm(size, eps, **norm)
        self.pre_fc_norm_hidden = RMSNorm(size, eps, **norm)
        self.fc = LinearBase(2 * size, size)
        self.layers = nn.ModuleList([layer])
        self.norm = RMSNorm(size, eps, **norm)

    def forward(self, embeds: torch.Tensor, hidden: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Write the batch's KV; return hidden states [O, hidden_size] after the last norm."""
        embeds, _ = self.pre_fc_norm_embedding.add_norm(None, embeds)
        hidden, _ = self.pre_fc_norm_hidden.add_norm(None, hidden)
        joined = self.norm.kernels.join_columns((embeds, hidden))
        output, residual = self.layers[0](None, self.fc(joined), batch, batch.output_indices)
        hidden, _ = self.norm.add_norm(output, residual)
        return hidden


_OF_TARGET = frozenset({"lm_head.", "language_model.", *OTHER_MODALITIES}) - {PREFIX}
"""Prefixes of tensors that are not the layer's."""
_AFTER = {
    "pre_fc_norm_embedding.": "enorm.",
    "pre_fc_norm_hidden.": "hnorm.",
    "fc.": "eh_proj.",
    "norm.": "shared_head.norm.",
    "layers.0.": "",
}
"""The names of modules in a layer after the target's last one."""


class MTPHead(Head):
    """The head. Its embedding and its language-model head are the target's."""

    def __init__(self, config: MTPConfig, max_model_len: int) -> None:
        super().__init__()
        self._prefix = config.prefix
        self.ignored_weights = _OF_TARGET | {"model."}
        if config.prefix != PREFIX:
            own = {f"{config.prefix}{name}." for name in ("embed_tokens", "shared_head.head")}
            layers = {f"model.layers.{index}." for index in range(config.num_target_layers)}
            self.ignored_weights = (
                _OF_TARGET | own | layers | {"model.embed_tokens.", "model.norm."}
            )
        self.features_size = config.hidden_size
        # The family without its network: it makes one layer.
        family = family_class(config.family)
        maker: DecoderForCausalLM = family.__new__(family)
        Family.__init__(maker, max_model_len)
        self.mtp = MTPParts(config, maker.make_layer(config, 0), **family.norm)
        self._checkpoint_name = maker.checkpoint_name
        self._embed: Callable[[torch.Tensor], torch.Tensor] | None = None
        self._logits: Callable[[torch.Tensor], torch.Tensor | None] | None = None

    def share(self, target: DecoderForCausalLM) -> None:
        """See `Head`."""
        self._embed = target.model.embed_tokens.forward
        self._logits = target.compute_logits

    def capture(self, target: DecoderForCausalLM, features: torch.Tensor) -> None:
        """See `Head`."""
        capture_output(target.model, features)

    def checkpoint_name(self, name: str, known: Collection[str]) -> str:
        """Return the checkpoint's name of tensor `name`, as the target's family has it."""
        if self._prefix != PREFIX:
            own = name.removeprefix(PREFIX)
            begin = next(each for each in _AFTER if own.startswith(each))
            name = self._prefix + _AFTER[begin] + own.removeprefix(begin)
        return self._checkpoint_name(name, known)

    def expect(self, known: Collection[str]) -> None:
        """Prepare for the form in which the checkpoint has the layer's experts."""
        expect_stored(self, [name for name in known if name.startswith(self._prefix)])

    def combine(self, features: torch.Tensor) -> torch.Tensor:
        """Return the target's hidden states as they are."""
        return features

    def forward(self, batch: Batch, hidden: torch.Tensor) -> torch.Tensor:
        """See `Head`. What is fed back is the hidden state after the last norm, as in training."""
        assert self._embed is not None, "share() comes first"
        found: torch.Tensor = self.mtp(self._embed(batch.input_ids), hidden, batch)
        return found

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor | None:
        """See `Head`."""
        assert self._logits is not None, "share() comes first"
        return self._logits(hidden)
