"""The EAGLE-3 draft head (arXiv 2503.01840): one layer over three hidden states of its target.

Position i takes the embedding of token i + 1 and the target's features of position i, and drafts
token i + 2. After the last features it continues with its own output in their place.

Its config.json is read in each form that is published. As in config.py, a setting that would change
the drafts but is not implemented is refused by name.
"""

import dataclasses
import functools
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from nanovllm.attention.batch import Batch
from nanovllm.errors import CheckpointError, UnsupportedModelError
from nanovllm.features.speculation.proposers.draft_head import Head
from nanovllm.layers.embed_head import ParallelLMHead, VocabParallelEmbedding
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.linear import RowParallelLinear
from nanovllm.layers.rotary_embedding import RotaryEmbedding
from nanovllm.loading.shards import Shard
from nanovllm.loading.tensor_files import read_header
from nanovllm.models.config_fields import config_bool, config_size
from nanovllm.models.decoder import DecoderForCausalLM, DecoderLayer, GatedMLP, SelfAttention
from nanovllm.models.model_config import ModelConfig
from nanovllm.options.validation import check_int, shown, unsupported
from nanovllm.utils.distributed import tensor_parallel
from nanovllm.worker.model_loader import check_weights

EAGLE3 = "LlamaForCausalLMEagle3"
"""The architecture of the head, whatever its config.json calls it."""
_ARCHITECTURES = (EAGLE3, "Eagle3LlamaForCausalLM")
_MODEL_TYPES = (None, "llama", "qwen2", "qwen3")
_LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
NUM_FEATURES = 3
"""Layers of the target model whose hidden states a head reads."""
_ONLY: dict[str, Any] = {
    "num_hidden_layers": 1,
    "bias": False,
    "qkv_bias": False,
    "is_causal": True,
    "logit_scale": 1,
    "parallel_drafting": False,
    "use_aux_norm": False,
    "use_aux_hidden_state": True,
    "num_aux_hidden_states": NUM_FEATURES,
    "quantization_config": None,
}
"""Settings of which one value is implemented, which is also the default."""
_OF_SPECULATORS = (
    "draft_vocab_size",
    "target_hidden_size",
    "norm_before_residual",
    "norm_before_fc",
    "fc_norm",
    "norm_output",
    "embed_requires_grad",
    "quantization_config",
    _LAYER_IDS,
)
"""Settings that the form of `speculators` has besides its transformer_layer_config."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Eagle3Config(ModelConfig):
    """The sizes and settings of an EAGLE-3 draft head for one target model.

    `vocab_size` is the target's; `num_layers` is 1.
    """

    draft_vocab_size: int
    """Tokens that the head can draft."""
    target_hidden_size: int
    layer_ids: tuple[int, ...]
    """Layers of the target whose inputs the head reads, from 0 on, ascending."""
    norm_before_residual: bool
    """Whether the residual of the layer begins after `hidden_norm`."""
    norm_before_fc: bool
    """Whether one RMSNorm, `input_norm`, is applied to all features together."""
    fc_norm: bool
    """Whether the features of each layer have a separate RMSNorm."""
    norm_output: bool
    """Whether the hidden state that is fed back is the one after the last norm."""
    qk_norm: bool
    """Whether queries and keys have an RMSNorm, as in Qwen3."""
    has_embedding: bool
    """Whether the head has its own embedding; otherwise it reads the target's."""
    has_d2t: bool
    """Whether a table says which token each draft id stands for; otherwise they are equal."""


def check_eagle3(
    head_config: dict[str, Any], target_config: ModelConfig, files: list[Path]
) -> Eagle3Config:
    """Return the config of the EAGLE-3 head in `files`; check that they hold what it needs.

    Args:
        head_config: the head's parsed config.json.
        files: the head's weights; none for dummy weights.

    Raises:
        UnsupportedModelError: the head has a setting that is not implemented.
        CheckpointError: the head is for another target, or as for `check_weights`.
    """
    names = [name for file in files for name in read_header(file)]
    try:
        config = read_eagle3_config(head_config, target_config, names)
    except CheckpointError as error:
        place = f"{files[0].parent}: " if files else ""
        raise type(error)(f"{place}{error}") from error
    if files:
        check_weights(config, files)
    return config


def read_eagle3_config(
    config: dict[str, Any], target: ModelConfig, tensor_names: Collection[str]
) -> Eagle3Config:
    """Read `config`, the parsed config.json of an EAGLE-3 head for `target`.

    Args:
        tensor_names: of the head's weights; they say what the head shares with its target.

    Raises:
        UnsupportedModelError: this is no EAGLE-3 head, or a setting is not implemented.
        CheckpointError: a field is missing or invalid, or the head is for another target.
    """
    flat = {key: value for key, value in _flat(config).items() if value is not None}
    if flat.get("model_type") not in _MODEL_TYPES:
        raise UnsupportedModelError(
            f"config.json: an EAGLE-3 head of model_type {shown(flat['model_type'])} is not "
            f"supported ({', '.join(filter(None, _MODEL_TYPES))})"
        )
    for key in [key for key in _ONLY if key in flat]:
        if flat[key] != _ONLY[key]:
            raise UnsupportedModelError(
                f"config.json: {key} {shown(flat[key])} is not supported in an EAGLE-3 head "
                f"(only {_ONLY[key]})"
            )
    dtype = str(target.dtype).removeprefix("torch.")
    model = ModelConfig.from_hf({**flat, "architectures": [EAGLE3]}, dtype)
    names = frozenset(name.removeprefix("model.") for name in tensor_names)
    vocab_size = model.vocab_size
    draft_vocab_size = config_size(flat, "draft_vocab_size", vocab_size, vocab_size)
    target_hidden_size = config_size(flat, "target_hidden_size", model.hidden_size)
    # A trained embedding must be in the file; one that was not trained is the target's.
    has_embedding = "embed_tokens.weight" in names or flat.get("embed_requires_grad") is True
    _check_target(model, target, target_hidden_size, has_embedding=has_embedding)
    return Eagle3Config(
        **vars(model) | {"module": __name__},
        draft_vocab_size=draft_vocab_size,
        target_hidden_size=target_hidden_size,
        layer_ids=_layer_ids(flat, target.num_layers),
        norm_before_residual=config_bool(flat, "norm_before_residual", False),
        norm_before_fc=config_bool(flat, "norm_before_fc", False),
        fc_norm=config_bool(flat, "fc_norm", False),
        norm_output=config_bool(flat, "norm_output", False),
        qk_norm=any(name.endswith("self_attn.q_norm.weight") for name in names),
        has_embedding=has_embedding,
        has_d2t="d2t" in names or draft_vocab_size < model.vocab_size,
    )


def _flat(config: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of the layer and of the head in one object."""
    if "speculators_model_type" in config:
        kind = config["speculators_model_type"]
        layer = config.get("transformer_layer_config")
        if kind != "eagle3":
            raise unsupported("config.json: speculators_model_type", kind, "eagle3")
        if not isinstance(layer, dict):
            raise CheckpointError(
                f"config.json: transformer_layer_config must be an object, is {shown(layer)}"
            )
        own = {key: config[key] for key in _OF_SPECULATORS if key in config}
        return {**layer, "eagle_config": None, "norm_before_residual": True, **own}
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and len(names) == 1 else names
    # The authors' own heads call themselves LlamaForCausalLM.
    if name not in _ARCHITECTURES and not (
        name == "LlamaForCausalLM" and "draft_vocab_size" in config
    ):
        raise UnsupportedModelError(
            f"config.json: architecture {shown(name)} is not an EAGLE-3 head "
            f"({', '.join(_ARCHITECTURES)}, or one of speculators)"
        )
    head = config.get("eagle_config") or {}
    if not isinstance(head, dict):
        raise CheckpointError(f"config.json: eagle_config must be an object, is {shown(head)}")
    return {**{key: value for key, value in head.items() if key != _LAYER_IDS}, **config}


def _check_target(
    model: ModelConfig, target: ModelConfig, target_hidden_size: int, *, has_embedding: bool
) -> None:
    """Raise CheckpointError if the head `model` is for another model than `target`."""
    if target_hidden_size != target.hidden_size:
        raise CheckpointError(
            f"config.json: the EAGLE-3 head is for a model with hidden_size {target_hidden_size}, "
            f"but the model that it is to draft for has {target.hidden_size}"
        )
    if model.vocab_size != target.vocab_size:
        raise CheckpointError(
            f"config.json: the EAGLE-3 head is for a vocabulary of {model.vocab_size} tokens, but "
            f"the model that it is to draft for has {target.vocab_size}"
        )
    if not has_embedding and model.hidden_size != target.hidden_size:
        raise CheckpointError(
            f"config.json: the EAGLE-3 head has hidden_size {model.hidden_size} and no "
            "embed_tokens.weight; it cannot use the embedding of a model with hidden_size "
            f"{target.hidden_size}"
        )


def _layer_ids(flat: dict[str, Any], num_layers: int) -> tuple[int, ...]:
    """Return the layers of the target whose inputs are the features.

    The setting next to the others (vLLM, speculators) counts in inputs. The one in eagle_config
    (SGLang, SpecForge, ModelOpt) counts in outputs: the output of layer i enters layer i + 1.
    """
    given = (flat.get(_LAYER_IDS), 0), ((flat.get("eagle_config") or {}).get(_LAYER_IDS), 1)
    found = [
        (values, _read_ids(values, num_layers - first, first)) for values, first in given if values
    ]
    if len(found) == 2 and found[0][1] != found[1][1]:
        raise CheckpointError(
            f"config.json: {_LAYER_IDS} {shown(found[0][0])} contradicts {shown(found[1][0])} in "
            "eagle_config, which counts in outputs of layers"
        )
    if found:
        return found[0][1]
    ids = (2, num_layers // 2, num_layers - 3)
    if ids != tuple(sorted(set(ids))):
        raise CheckpointError(
            f"config.json has no {_LAYER_IDS}, and the usual ones need a model of at least 7 "
            f"layers; the model to draft for has {num_layers}"
        )
    return ids


def _read_ids(values: Any, num_layers: int, first: int) -> tuple[int, ...]:
    """Return the checked `values`, each plus `first`: three layers of the target, ascending."""
    name = f"config.json: {_LAYER_IDS}"
    if not isinstance(values, list) or len(values) != NUM_FEATURES:
        raise CheckpointError(f"{name} must be {NUM_FEATURES} layers, is {shown(values)}")
    ids = tuple(
        first + check_int(CheckpointError, f"{name}: a layer", value, 0, num_layers - 1)
        for value in values
    )
    if ids != tuple(sorted(set(ids))):
        raise CheckpointError(f"{name} must ascend, is {shown(values)}")
    return ids


class Eagle3Layer(nn.Module):
    """A decoder layer whose attention reads the embedding and the hidden state side by side."""

    def __init__(self, config: Eagle3Config, rotary_emb: RotaryEmbedding) -> None:
        super().__init__()
        self._norm_before_residual = config.norm_before_residual
        self.self_attn = SelfAttention(
            config,
            rotary_emb,
            bias=config.flag("attention_bias"),
            output_bias=config.flag("attention_bias"),
            qk_norm=config.qk_norm,
            input_size=2 * config.hidden_size,
        )
        self.mlp = GatedMLP(config, bias=config.flag("mlp_bias"))
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self, embeds: torch.Tensor, hidden: torch.Tensor, batch: Batch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the KV of all T tokens; return (MLP output, residual), [O, hidden_size] each."""
        embeds, _ = self.input_layernorm.add_norm(None, embeds)
        normed, residual = self.hidden_norm.add_norm(None, hidden)
        joined = self.hidden_norm.kernels.join_columns((embeds, normed))
        if self._norm_before_residual:
            residual = normed
        hidden = self.self_attn(joined, batch)
        hidden, residual = self.post_attention_layernorm.add_norm(hidden, batch.outputs(residual))
        return self.mlp(hidden), residual


class DraftVocabulary(nn.Module):
    """The token that each draft id stands for: the checkpoint's d2t holds the differences."""

    d2t: torch.Tensor

    def __init__(self, draft_vocab_size: int) -> None:
        super().__init__()
        d2t = torch.zeros(draft_vocab_size, dtype=torch.int64)
        self.register_buffer("d2t", d2t, persistent=False)

    def shards(self, prefix: str) -> Iterator[Shard]:
        """Yield the whole table: each rank has it."""
        yield Shard(prefix, tuple(self.d2t.shape), self.d2t)


class LlamaForCausalLMEagle3(Head):
    """The head. Its modules have the names of the authors' checkpoints.

    Args:
        max_model_len: number of positions in the table of rotary angles; the positions that the
            head was trained for are not a limit, because drafts only have to be likely.
    """

    def __init__(self, config: Eagle3Config, max_model_len: int) -> None:
        super().__init__()
        self.config = config
        hidden_size = config.hidden_size
        eps = config.rms_norm_eps
        features_size = self.features_size = NUM_FEATURES * config.target_hidden_size
        self.input_norm = RMSNorm(features_size, eps) if config.norm_before_fc else None
        self.fc_norm = nn.ModuleList(
            RMSNorm(config.target_hidden_size, eps) for _ in range(NUM_FEATURES * config.fc_norm)
        )
        self.fc = RowParallelLinear(features_size, hidden_size, bias=False)
        rotary_emb = RotaryEmbedding(
            max_model_len, *config.rope.inverse_frequencies(config.head_dim)
        )
        self.midlayer = Eagle3Layer(config, rotary_emb)
        self.norm = RMSNorm(hidden_size, eps)
        self.lm_head = ParallelLMHead(config.draft_vocab_size, hidden_size)
        self.d2t = DraftVocabulary(config.draft_vocab_size) if config.has_d2t else None
        self.embed_tokens: VocabParallelEmbedding | None = None
        self._embed: Callable[[torch.Tensor], torch.Tensor] | None = None
        if config.has_embedding:
            self.embed_tokens = VocabParallelEmbedding(config.vocab_size, hidden_size)
            self._embed = self.embed_tokens.forward
        self.ignored_weights = frozenset({"t2d", "model.t2d"})

    def share(self, target: DecoderForCausalLM) -> torch.Tensor | None:
        """See `Head`. The embedding may be the head's own.

        Raises:
            CheckpointError: a draft id stands for no token of the vocabulary: it would be read as
                a row of memory.
        """
        if self.embed_tokens is None:
            self._embed = target.model.embed_tokens.forward
        if self.d2t is None:
            return None
        d2t = self.d2t.d2t
        tokens = torch.arange(len(d2t), device=d2t.device) + d2t
        wrong = (tokens < 0) | (tokens >= self.config.vocab_size)
        if wrong.any():
            index = int(wrong.nonzero()[0, 0])
            raise CheckpointError(
                f"d2t: draft id {index} stands for token {int(tokens[index])}, but the vocabulary "
                f"has {self.config.vocab_size}"
            )
        return tokens

    def capture(self, target: DecoderForCausalLM, features: torch.Tensor) -> None:
        """See `Head`."""
        capture_features(target, self.config.layer_ids, features)

    def checkpoint_name(self, name: str, known: Collection[str]) -> str:
        """Return the checkpoint's name of tensor `name`: one of the published ones."""
        other = name.replace("midlayer.", "layers.0.", 1)
        names = (name, other, f"model.{name}", f"model.{other}")
        return next((each for each in names if each in known), name)

    def combine(self, features: torch.Tensor) -> torch.Tensor:
        """See `Head`. `features` are what enters three of the target's layers, side by side."""
        join = self.norm.kernels.join_columns
        if self.input_norm is not None:
            features, _ = self.input_norm.add_norm(None, features)
        if len(self.fc_norm):
            parts = features.chunk(NUM_FEATURES, dim=1)
            whole = [join((part,)) for part in parts]
            norms = [norm for norm in self.fc_norm if isinstance(norm, RMSNorm)]
            normed = [norm.add_norm(None, x)[0] for norm, x in zip(norms, whole, strict=True)]
            features = join(normed)
        rank = tensor_parallel().rank
        size = features.shape[1] // tensor_parallel().size
        return self.fc(features[:, rank * size : (rank + 1) * size])

    def forward(self, batch: Batch, hidden: torch.Tensor) -> torch.Tensor:
        """See `Head`. What is fed back is before the last norm, unless the config says
        `norm_output`.
        """
        assert self._embed is not None, "share() comes first"
        embeds = self._embed(batch.input_ids)
        output, residual = self.midlayer(embeds, hidden, batch)
        normed, total = self.norm.add_norm(output, residual)
        return normed if self.config.norm_output else total

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor | None:
        """See `Head`: V is `draft_vocab_size`."""
        if not self.config.norm_output:
            hidden, _ = self.norm.add_norm(None, hidden)
        return self.lm_head(hidden)


def capture_features(
    model: DecoderForCausalLM, layer_ids: Sequence[int], pool: torch.Tensor
) -> None:
    """Store what enters the layers `layer_ids` in `pool`, from the next forward pass on.

    Args:
        layer_ids: from 0 on, each one once.
        pool: [slots, len(layer_ids) * hidden_size], a row for each slot of the KV cache. The
            layers' hidden states lie side by side in the order of `layer_ids`.
    """
    parts = pool.chunk(len(layer_ids), dim=1)
    for layer_id, part in zip(layer_ids, parts, strict=True):
        layer = model.model.layers[layer_id]
        assert isinstance(layer, DecoderLayer)
        layer.store_input = functools.partial(layer.input_layernorm.kernels.store_rows, part)
