"""The drafting layer of a checkpoint that was trained to predict several tokens at once (MTP).

Its tensors are those whose names begin with "mtp.", in the same files as the target's, or they are
those of a layer after the target's last one, as in DeepSeek-V3.

Position i takes the embedding of token i + 1 and the target's last hidden state of position i, and
drafts token i + 2. After the last hidden states it continues with its own output in their place.
"""

import dataclasses
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import nn

from nanovllm.attention.batch import Batch
from nanovllm.errors import CheckpointError, UnsupportedModelError
from nanovllm.features.speculation.proposers.draft_head import Head
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.linear import LinearBase
from nanovllm.loading.files import is_gguf
from nanovllm.loading.tensor_files import read_header
from nanovllm.models.decoder import DecoderForCausalLM, DecoderLayer, Family
from nanovllm.models.expert_parts import expect_stored
from nanovllm.models.model_config import ModelConfig
from nanovllm.models.parts import OTHER_MODALITIES
from nanovllm.models.registry import family_class
from nanovllm.options.validation import shown
from nanovllm.worker.model_loader import NetworkSpec, check_weights

PREFIX = "mtp."
AFTER = ("DeepseekV3ForCausalLM", "Glm4MoeForCausalLM", "Glm4MoeLiteForCausalLM")
"""Architectures of targets whose layer comes after the last one."""
FAMILIES = (
    *AFTER,
    "MellumForCausalLM",
    "Qwen3_5ForCausalLM",
    "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForCausalLM",
    "Qwen3_5MoeForConditionalGeneration",
    "Qwen3NextForCausalLM",
)
"""Architectures of targets whose layer is of the form that is here."""
_ONLY: dict[str, Any] = {
    "mtp_num_hidden_layers": 1,
    "num_nextn_predict_layers": 1,
    "mtp_use_dedicated_embeddings": False,
}
"""Settings of which one value is implemented, which is also the default."""
_SUFFIXES = ("_scale", "_scale_inv", "_packed", ".qweight", "_blocks")
"""Ends of the names of tensors that belong to a quantised weight."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MTPConfig(ModelConfig):
    """The target's sizes and settings, of one layer: with full attention, unless they say more."""

    family: str
    """The target's architecture."""
    num_target_layers: int

    @property
    def prefix(self) -> str:
        """Return what the names of the layer's tensors begin with."""
        after = f"model.layers.{self.num_target_layers}."
        return after if self.family in AFTER else PREFIX


def check_mtp(target: NetworkSpec) -> NetworkSpec:
    """Return what the ranks load of the checkpoint of `target` for its drafts.

    The weights have the form in which the checkpoint has them: the option `quantization` is for
    the target alone.

    Raises:
        UnsupportedModelError: the model has no such layer, or one of another form.
        CheckpointError: its tensors are missing, or as for `check_weights`.
    """
    names = [name for file in target.files for name in read_header(file)]
    config = _read(target.model_config)
    own = [name for name in names if name.startswith(config.prefix)]
    if not any(name.endswith(_SUFFIXES) for name in own):
        config = dataclasses.replace(config, quantization_config=None)
    if target.files:
        if not own:
            needed = f"{PREFIX}fc.weight, {PREFIX}norm.weight, {PREFIX}layers.0.*"
            if config.prefix != PREFIX:
                needed = f"{config.prefix}eh_proj.weight, {config.prefix}self_attn.*"
            file = target.files[0]
            place = file if is_gguf(file) else file.parent
            raise CheckpointError(
                f"{place}: speculative_config: method mtp needs the tensors "
                f"{needed} and others, but the checkpoint has none whose name begins with "
                f"{config.prefix}"
            )
        check_weights(config, target.files)
    options = dataclasses.replace(target.config, quantization="none", speculative_config=None)
    return NetworkSpec(options, config, target.files)


def _read(target: ModelConfig) -> MTPConfig:
    if target.architecture not in FAMILIES:
        raise UnsupportedModelError(
            f"speculative_config: method mtp is not supported for {target.architecture} (only "
            f"{', '.join(FAMILIES)})"
        )
    for key, only in _ONLY.items():
        value = target.fields.get(key)
        if value not in (None, 0, only):  # 0: there is none, and no tensor of it
            raise UnsupportedModelError(
                f"config.json: {key} {shown(value)} is not supported with method mtp (only {only})"
            )
    layer: dict[str, Any] = {
        "num_hidden_layers": 1,
        "layer_types": ["full_attention"],
        "first_k_dense_replace": 0,
        "mlp_layer_types": ["sparse"],
    }
    if target.architecture == "MellumForCausalLM":
        layer["layer_types"] = target.fields.get("mtp_layer_types") or ["sliding_attention"]
        layer["mlp_layer_types"] = target.fields.get("mtp_mlp_layer_types") or ["sparse"]
    settings = vars(target) | {"architecture": "MTPHead", "num_layers": 1, "module": __name__}
    return MTPConfig(
        **settings | {"fields": target.fields | layer},
        family=target.architecture,
        num_target_layers=target.num_layers,
    )


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
        output, residual = self.layers[0](None, self.fc(joined), batch)
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
        """See `Head`: what leaves the target's decoder, after its last norm.

        Its last layer then computes all tokens of a batch, not only those that need logits.
        """
        decoder = target.model
        forward = decoder.forward
        kernels = decoder.norm.kernels

        def storing(batch: Batch) -> torch.Tensor:
            hidden = forward(batch.before_last)
            kernels.store_rows(features, hidden, batch.slot_mapping)
            return batch.outputs(hidden)

        decoder.forward = storing  # type: ignore[method-assign]

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
