"""What a model family declares besides its layers: fields of config.json, names of tensors."""

import re
from collections.abc import Collection
from typing import Any, ClassVar

import torch
from torch import nn

from nanovllm.layers.rotary_embedding import RopeConfig, RotaryEmbedding


class Family(nn.Module):
    """The base of `DecoderForCausalLM`.

    Args:
        max_model_len: number of positions in the tables of rotary angles.
    """

    defaults: ClassVar[dict[str, Any]] = {}
    """The family's values of fields that a config.json may lack."""
    aliases: ClassVar[dict[str, str]] = {}
    """The family's names for some common fields: see `ModelConfig.from_hf`."""
    reads: ClassVar[frozenset[str]] = frozenset()
    """The fields of `model_config.ONLY_SOME_READ` that the family honours."""
    ignores: ClassVar[frozenset[str]] = frozenset()
    """Fields that a config.json may have and that neither transformers nor the family applies."""
    names: ClassVar[dict[str, str]] = {}
    """The checkpoint's names for modules that have other names here."""
    left_out: ClassVar[tuple[str, ...]] = ()
    """Tensors that the network does not need and does not load: the beginnings of their names, or
    their ends where a "." comes first."""
    interleaved: ClassVar[bool] = False
    """Whether the pairs that rotate are adjacent numbers of a head. See `QKNormRope`."""
    only: ClassVar[dict[str, tuple[Any, ...]]] = {}
    """The values that some fields may have: others are refused."""
    skipped_positions: ClassVar[int] = 0
    """Of max_position_embeddings: rows of a table that no position has."""
    no_position: ClassVar[int | None] = None
    """The token that takes no position of its own, if there is one: see `PositionedDecoder`."""
    norm: ClassVar[dict[str, Any]] = {}
    """Options of the norms, see `decoder.make_norm`."""

    def __init__(self, max_model_len: int) -> None:
        super().__init__()
        self.max_model_len = max_model_len
        self.rotary: dict[tuple[RopeConfig | None, int], RotaryEmbedding] = {}

    def rotary_emb(self, rope: RopeConfig | None, head_dim: int) -> RotaryEmbedding:
        """Return the rotary embedding for `rope` (None: no rotation). Equal ones are shared."""
        key = rope, head_dim
        if key not in self.rotary:
            frequencies = torch.zeros(head_dim // 2, device="cpu"), 1.0
            if rope is not None:
                frequencies = rope.inverse_frequencies(head_dim, self.max_model_len)
            self.rotary[key] = RotaryEmbedding(self.max_model_len, *frequencies)
            self.rotary[key].interleaved = self.interleaved
        return self.rotary[key]

    def checkpoint_name(self, name: str, known: Collection[str]) -> str:
        """Return the checkpoint's name for tensor `name`. See `Renamed` in loading/shards.py."""
        if self.names:
            pattern = "|".join(map(re.escape, self.names))
            name = re.sub(pattern, lambda found: self.names[found[0]], name)
        return next((each for each in self.all_names(name) if each in known), name)

    def all_names(self, name: str) -> list[str]:
        """Return the names that checkpoints may have for the tensor that transformers calls `name`,
        which is the first.
        """
        label = ["score.weight"] if name == "lm_head.weight" else []
        names = name, *self.published_names(name), *label
        return [placed for each in names for placed in placed_names(each)]

    def published_names(self, name: str) -> tuple[str, ...]:
        """Return the names that files of the family have in place of transformers' `name`, or
        transformers' own modules in place of the `name` in its files.
        """
        return ()


def placed_names(name: str) -> tuple[str, ...]:
    """Return the names that a checkpoint's tensor `name` may have: a model that also takes images
    nests its text model, and one without a head is not nested at all.
    """
    nested = name.replace("model.", "model.language_model.", 1)
    return name, nested, f"language_model.{name}", name.removeprefix("model.")
