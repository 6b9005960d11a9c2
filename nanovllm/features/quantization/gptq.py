"""Checkpoints that AutoGPTQ and GPTQModel write, and those of AutoAWQ with its kernel GEMM.

GPTQ: 4 or 8 bits, packed along the inputs. `qweight` [in * bits / 32, out] int32, `qzeros`
[groups, out * bits / 32] int32, `scales` [groups, out], `g_idx` [in] int32. The tensors of
checkpoint_format "gptq" have one less than the zero point. Layout: auto-round 0.16.1,
auto_round_extension/torch/qlinear_torch_zp.py.

AWQ: 4 bits, packed along the outputs. `qweight` [in, out / 8] int32, `qzeros` [groups, out / 8]
int32, `scales` [groups, out]. The eight numbers of a word are in a special order. Layout:
compressed_tensors 0.20, AutoAWQConverter.
"""

from typing import Any

import torch

from nanovllm.errors import CheckpointError
from nanovllm.features.quantization.quantized_fields import Field
from nanovllm.features.quantization.quantized_integers import IntegerForm, QuantizedIntegers
from nanovllm.features.quantization.settings import (
    WHERE,
    Names,
    check_supported,
    one_form,
    read_group_size,
    read_names,
    read_object,
    read_regex,
    spellings,
    unsupported,
)
from nanovllm.layers.linear import WeightFormat, WeightModule
from nanovllm.options.validation import shown
from nanovllm.utils.safe_regex import SafeRegex

_MAX_RULES = 256
_ONLY = "modules_in_block_to_quantize"
_LESS = {"gptq": 1, "gptq_v2": 0}
"""By `checkpoint_format`: how much less than the zero point is in the file."""
_FIXED: dict[str, tuple[Any, ...]] = {
    "is_marlin_format": (None, False),
    "lm_head": (None, False, True),
    "pack_dtype": (None, "int32"),
    "quant_type": (None,),
    "rotation": (None,),
    "adapter": (None,),
}
"""Supported values of fields that change the layout or the network."""


class Gptq(WeightFormat):
    """The format of a GPTQ checkpoint."""

    name = "GPTQ"

    def __init__(self, config: dict[str, Any]) -> None:
        check_supported(config, _FIXED)
        stored = config.get("checkpoint_format") or config.get("format") or "gptq"
        if not isinstance(stored, str) or stored not in _LESS:
            raise unsupported("checkpoint_format", stored, ", ".join(_LESS))
        self._form = _form(config, _LESS[stored], WHERE)
        self._rules = _rules(config, _LESS[stored])
        self._only = _only(config)

    def form(self, name: str) -> IntegerForm | None:
        """Return how linear `name` is stored; None: as plain numbers."""
        if self._only is not None and not self._only.contains_part(name):
            return None
        for regex, form in self._rules:
            if any(regex.match(spelt) for spelt in spellings(name)):
                return form
        return self._form

    def quantized(self, matrix: WeightModule, names: list[str]) -> QuantizedIntegers | None:
        form = one_form(names, [self.form(name) for name in names], f"dynamic, {_ONLY}")
        return None if form is None else QuantizedIntegers(matrix, form)


def _form(config: dict[str, Any], less: int, where: str) -> IntegerForm:
    """Read how linears are stored."""
    bits = config.get("bits")
    ordered = config.get("desc_act", False)
    if type(bits) is not int or bits not in (4, 8):
        raise unsupported("bits", bits, "4 and 8", where)
    group = read_group_size(config.get("group_size", 128), where)
    if not isinstance(ordered, bool | None):
        raise CheckpointError(f"{where}: desc_act must be true or false, is {shown(ordered)}")
    size = "channel" if group is None else f"g{group}"
    return IntegerForm(
        f"GPTQ W{bits}A16 {size}{' desc_act' if ordered else ''}",
        bits,
        group,
        Field("qweight", torch.int32, 1, "inputs", bits, transposed=True),
        Field("scales", torch.float32, group, transposed=True),
        Field("qzeros", torch.int32, group, "outputs", bits, transposed=True),
        zeros_less=less,
        order="g_idx",
        in_place=not ordered,
        maybe_bias=True,
    )


def _rules(config: dict[str, Any], less: int) -> list[tuple[SafeRegex, IntegerForm | None]]:
    """Read `dynamic`: regular expressions, each with what differs, or None after "-:"."""
    field = f"{WHERE}: dynamic"
    rules: list[tuple[SafeRegex, IntegerForm | None]] = []
    for pattern, changes in read_object(config.get("dynamic") or {}, field, _MAX_RULES).items():
        regex = read_regex(pattern.removeprefix("-:").removeprefix("+:"), field)
        form = None
        if not pattern.startswith("-:"):
            where = f"{field}: {shown(pattern)}"
            form = _form({**config, **read_object(changes, where)}, less, where)
        rules.append((regex, form))
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


_AWQ_BITS = 4
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where the 4 bits of each of eight neighbours are: the first in place 0, the next in 4."""
_AWQ_EXCLUDED = "modules_to_not_convert"
_AWQ_FIXED: dict[str, tuple[Any, ...]] = {
    "version": (None, "gemm", "GEMM"),
    "zero_point": (None, True),
    "lm_head": (None, False, True),
}
"""Supported values of fields that change the layout."""


class Awq(WeightFormat):
    """The format of an AWQ checkpoint."""

    name = "AWQ"

    def __init__(self, config: dict[str, Any]) -> None:
        check_supported(config, _AWQ_FIXED)
        bits = config.get("bits", config.get("w_bit"))
        if type(bits) is not int or bits != _AWQ_BITS:
            raise unsupported("bits", bits, str(_AWQ_BITS))
        group = read_group_size(config.get("group_size", config.get("q_group_size", 128)))
        self._excluded = Names(read_names(config, _AWQ_EXCLUDED), f"{WHERE}: {_AWQ_EXCLUDED}")
        self._form = IntegerForm(
            f"AWQ W4A16 {'channel' if group is None else f'g{group}'}",
            _AWQ_BITS,
            group,
            _packed("qweight", 1),
            Field("scales", torch.float32, group, transposed=True),
            _packed("qzeros", group),
        )

    def quantized(self, matrix: WeightModule, names: list[str]) -> QuantizedIntegers | None:
        forms = [None if self._excluded.contains_text_of(name) else self._form for name in names]
        form = one_form(names, forms, _AWQ_EXCLUDED)
        return None if form is None else QuantizedIntegers(matrix, form)


def _packed(suffix: str, group: int | None) -> Field:
    return Field(suffix, torch.int32, group, "outputs", _AWQ_BITS, _AWQ_ORDER, transposed=True)
