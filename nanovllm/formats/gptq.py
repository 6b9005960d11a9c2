"""Checkpoints that AutoGPTQ and GPTQModel write: 4 or 8 bits, packed along the inputs.

`qweight` [in * bits / 32, out] int32, `qzeros` [groups, out * bits / 32] int32, `scales`
[groups, out], `g_idx` [in] int32. The tensors of checkpoint_format "gptq" have one less than the
zero point. Layout: auto-round 0.16.1, auto_round_extension/torch/qlinear_torch_zp.py.
"""

from typing import Any, NamedTuple

import torch

from nanovllm.errors import CheckpointError
from nanovllm.formats.fields import Field
from nanovllm.formats.names import Names, read_regex, spellings
from nanovllm.formats.settings import (
    WHERE,
    check_supported,
    one_form,
    read_group_size,
    read_object,
    unsupported,
)
from nanovllm.formats.stored_integers import IntegerForm, StoredIntegers
from nanovllm.layers.linear import Matrix
from nanovllm.options.validation import shown
from nanovllm.utils.safe_regex import SafeRegex

_MAX_RULES = 256
_ONLY = "modules_in_block_to_quantize"
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
    group_size: int | None
    """None: the whole row."""
    desc_act: bool

    def __str__(self) -> str:
        size = "channel" if self.group_size is None else f"g{self.group_size}"
        return f"GPTQ W{self.bits}A16 {size}{' desc_act' if self.desc_act else ''}"


class Gptq:
    """The format of a GPTQ checkpoint."""

    name = "GPTQ"

    def __init__(self, config: dict[str, Any]) -> None:
        check_supported(config, _FIXED)
        stored = config.get("checkpoint_format") or config.get("format") or "gptq"
        if not isinstance(stored, str) or stored not in _LESS:
            raise unsupported("checkpoint_format", stored, ", ".join(_LESS))
        self._less = _LESS[stored]
        self._settings = _settings(config, {}, WHERE)
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
        settings = one_form(names, [self.settings(name) for name in names], f"dynamic, {_ONLY}")
        return None if settings is None else StoredIntegers(matrix, _form(settings, self._less))


def _form(settings: _Settings, less: int) -> IntegerForm:
    bits, group, _ = settings
    return IntegerForm(
        str(settings),
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
        raise unsupported("bits", bits, "4 and 8", where)
    group = read_group_size(size, where)
    if not isinstance(order, bool | None):
        raise CheckpointError(f"{where}: desc_act must be true or false, is {shown(order)}")
    return _Settings(bits, group, bool(order))


def _rules(config: dict[str, Any]) -> list[tuple[SafeRegex, _Settings | None]]:
    """Read `dynamic`: regular expressions, each with what differs, or None after "-:"."""
    field = f"{WHERE}: dynamic"
    rules: list[tuple[SafeRegex, _Settings | None]] = []
    for pattern, changes in read_object(config.get("dynamic") or {}, field, _MAX_RULES).items():
        regex = read_regex(pattern.removeprefix("-:").removeprefix("+:"), field)
        settings = None
        if not pattern.startswith("-:"):
            where = f"{field}: {shown(pattern)}"
            settings = _settings(config, read_object(changes, where), where)
        rules.append((regex, settings))
    return rules


def _only(config: dict[str, Any]) -> Names | None:
    """Read the list of the linears in GPTQ; it may be in lists. None: all are."""
    entries = config.get(_ONLY)
    if not entries:
        return None
    lists: list[Any] = entries if isinstance(entries, list) else [None]
    names = [name for each in lists for name in (each if isinstance(each, list) else [each])]
    if not all(isinstance(name, str) for name in names):
        raise CheckpointError(f"{WHERE}: {_ONLY} must be a list of names, is {shown(entries)}")
    return Names(names, f"{WHERE}: {_ONLY}")
