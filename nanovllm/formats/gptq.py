"""Checkpoints that AutoGPTQ and GPTQModel write: 4 or 8 bits, packed along the inputs.

`qweight` [in * bits / 32, out] int32, `qzeros` [groups, out * bits / 32] int32, `scales`
[groups, out], `g_idx` [in] int32. The tensors of checkpoint_format "gptq" have one less than the
zero point. Layout: auto-round 0.16.1, auto_round_extension/torch/qlinear_torch_zp.py.
"""

from typing import Any, NamedTuple

import torch

from nanovllm.errors import CheckpointError, UnsupportedModelError
from nanovllm.formats.fields import Field
from nanovllm.formats.names import Names, listed, read_regex, spellings
from nanovllm.formats.stored_integers import IntegerForm, StoredIntegers
from nanovllm.layers.linear import Matrix
from nanovllm.options.validation import shown
from nanovllm.utils.safe_regex import SafeRegex

_WHERE = "quantization_config"
_MAX_RULES = 256
_MAX_GROUP = 2**20
_LESS = {"gptq": 1, "gptq_v2": 0}
"""By `checkpoint_format`: how much less than the zero point is in the file."""
_FIXED: dict[str, tuple[Any, ...]] = {
    "is_marlin_format": (None, False),
    "lm_head": (None, False),
    "pack_dtype": (None, "int32"),
    "quant_type": (None,),
    "rotation": (None,),
    "adapter": (None,),
}
"""Supported values of fields that change the layout or the network."""


class _Settings(NamedTuple):
    """How a linear is stored."""

    bits: int
    group_size: int
    """-1: the whole row."""
    desc_act: bool


class Gptq:
    """The format of a GPTQ checkpoint.

    Args:
        config: `quantization_config`.

    Raises:
        UnsupportedModelError: a setting is not implemented.
        CheckpointError: a field has the wrong type.
    """

    name = "GPTQ"

    def __init__(self, config: dict[str, Any]) -> None:
        for key, values in _FIXED.items():
            if (value := config.get(key)) not in values:
                raise UnsupportedModelError(
                    f"{_WHERE}: {key} {shown(value)} is not supported (only "
                    f"{', '.join(map(repr, values))})"
                )
        stored = config.get("checkpoint_format") or config.get("format") or "gptq"
        if not isinstance(stored, str) or stored not in _LESS:
            raise UnsupportedModelError(
                f"{_WHERE}: checkpoint_format {shown(stored)} is not supported (only "
                f"{', '.join(_LESS)})"
            )
        self._less = _LESS[stored]
        self._settings = _settings(config, {}, _WHERE)
        self._rules = _rules(config)
        self._only = _only(config)

    def settings(self, name: str) -> _Settings | None:
        """Return how linear `name` is stored; None: as plain numbers."""
        if self._only is not None and not self._only.have_part(name):
            return None
        for regex, settings in self._rules:
            if any(regex.match(spelt) for spelt in spellings(name)):
                return settings
        return self._settings

    def stored(self, matrix: Matrix, names: list[str]) -> StoredIntegers | None:
        """Return how the checkpoint stores the linears `names`, which `matrix` merges.

        Raises:
            UnsupportedModelError: not all of them are stored in the same way.
        """
        found = [self.settings(name) for name in names]
        if any(settings != found[0] for settings in found):
            raise UnsupportedModelError(
                f"{listed(names)} are computed as one, so all must be stored in one way: the "
                "rules of `dynamic` or modules_in_block_to_quantize tell them apart"
            )
        if found[0] is None:
            return None
        return StoredIntegers(matrix, _form(found[0], self._less))


def _form(settings: _Settings, less: int) -> IntegerForm:
    bits = settings.bits
    group = None if settings.group_size == -1 else settings.group_size
    size = "channel" if group is None else f"g{group}"
    order = " desc_act" if settings.desc_act else ""
    return IntegerForm(
        f"GPTQ W{bits}A16 {size}{order}",
        bits,
        group,
        Field("qweight", torch.int32, 1, "inputs", bits, transposed=True),
        Field("scales", torch.float32, group, transposed=True),
        Field("qzeros", torch.int32, group, "outputs", bits, transposed=True),
        zeros_less=less,
        order="g_idx" if settings.desc_act else None,
        places=None if settings.desc_act else "g_idx",
        maybe_bias=True,
    )


def _settings(config: dict[str, Any], changes: dict[str, Any], where: str) -> _Settings:
    """Read what may differ between linears, from `config` with `changes`."""
    bits, size, order = (
        changes.get(key, config.get(key, default))
        for key, default in (("bits", None), ("group_size", 128), ("desc_act", False))
    )
    if type(bits) is not int or bits not in (4, 8):
        raise UnsupportedModelError(f"{where}: bits {shown(bits)} is not supported (only 4 and 8)")
    if type(size) is not int or size == 0 or not -1 <= size <= _MAX_GROUP:
        raise CheckpointError(
            f"{where}: group_size must be from 1 to {_MAX_GROUP}, or -1, is {shown(size)}"
        )
    if not isinstance(order, bool | None):
        raise CheckpointError(f"{where}: desc_act must be true or false, is {shown(order)}")
    return _Settings(bits, size, bool(order))


def _rules(config: dict[str, Any]) -> list[tuple[SafeRegex, _Settings | None]]:
    """Read `dynamic`: regular expressions, each with what differs, or None after "-:"."""
    dynamic = config.get("dynamic") or {}
    if not isinstance(dynamic, dict) or len(dynamic) > _MAX_RULES:
        raise CheckpointError(
            f"{_WHERE}: dynamic must be an object of at most {_MAX_RULES} rules, is "
            f"{shown(dynamic)}"
        )
    rules: list[tuple[SafeRegex, _Settings | None]] = []
    for pattern, changes in dynamic.items():
        field = f"{_WHERE}: dynamic"
        regex = read_regex(pattern.removeprefix("-:").removeprefix("+:"), field)
        if pattern.startswith("-:"):
            rules.append((regex, None))
        elif isinstance(changes, dict):
            settings = _settings(config, changes, f"{field}: {shown(pattern)}")
            rules.append((regex, settings))
        else:
            raise CheckpointError(
                f"{field}: {shown(pattern)} must have an object, has {shown(changes)}"
            )
    return rules


def _only(config: dict[str, Any]) -> Names | None:
    """Read the list of the linears in GPTQ; it may be in lists. None: all are."""
    key = "modules_in_block_to_quantize"
    entries = config.get(key)
    if not entries:
        return None
    lists: list[Any] = entries if isinstance(entries, list) else [None]
    names = [name for each in lists for name in (each if isinstance(each, list) else [each])]
    if not all(isinstance(name, str) for name in names):
        raise CheckpointError(f"{_WHERE}: {key} must be a list of names, is {shown(entries)}")
    return Names(names, f"{_WHERE}: {key}")
