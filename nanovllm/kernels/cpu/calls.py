"""How Python writes a call of a C kernel, for `nv_run` to read: see csrc/run.c. Knows no tensor."""

import struct
from collections.abc import Sequence

CALL_BYTES = 8 * 26
"""A call has 26 words of 64 bits: the kernel's number, its arguments, padding."""

# Kernels in the order of their numbers, and the types of their arguments: p pointer, n size,
# f float. Upper case: the number of tokens, which `nv_run` can replace. It is the number of rows
# where the kernel reads cu_seqlens.
_KERNELS = {
    "nv_pack": "ppnn",
    "nv_linear": "pnpppNnn",
    "nv_gather": "pppNn",
    "nv_pack_int": "pppppnnnnn",
    "nv_linear_int": "pnppppppNnnnnn",
    "nv_gather_int": "ppppppNnnnn",
    "nv_add_rms_norm": "ppppNnfnf",
    "nv_mul_act": "pnnpnpnNnn",
    "nv_store": "pppppppppnnNnnnnnnnfnnnn",
    "nv_attention": "pppnnpnpppNnnnnnnff",
    "nv_sample": "pnppppppppppnnf",
    "nv_to_float": "ppn",
    "nv_forbid": "pppnnn",
    "nv_batch": "pnnpnnppppppnnnnnnpp",
    "nv_ngram": "pnpnnnp",
    "nv_copy_rows": "pnppnpNn",
    "nv_route": "pppppNnnnfn",
    "nv_expert_gate_up": "pppppppNnnnnnnnnn",
    "nv_expert_down": "pppppppppNnnnnnnn",
    "nv_rms_norm": "pnppnNnfn",
    "nv_scale": "ppNnf",
    "nv_causal_conv": "pnppppnppnppNnnn",
    "nv_gated_delta": "ppnpnppppnppnppNnnnn",
    "nv_gated_rms_norm": "pnpnppNnnf",
    "nv_add_lora": "pnpppppppppNnnnn",
}
_TYPES = {"p": "q", "n": "q", "N": "q", "f": "d"}
_FORMATS = {
    name: struct.Struct(
        "@q" + "".join(_TYPES[kind] for kind in kinds) + f"{CALL_BYTES - 8 - 8 * len(kinds)}x"
    )
    for name, kinds in _KERNELS.items()
}
_NUMBERS = {name: number for number, name in enumerate(_KERNELS)}


def pack_call(name: str, args: Sequence[int | float]) -> bytes:
    """Return a call of kernel `name` as `nv_run` reads it; pointers in `args` are addresses."""
    return _FORMATS[name].pack(_NUMBERS[name], *args)


def size_of(name: str, args: Sequence[int | float]) -> int | float | None:
    """Return the size in `args` that `nv_run` can replace, None if kernel `name` has none."""
    index = _KERNELS[name].find("N")
    return args[index] if index >= 0 else None
