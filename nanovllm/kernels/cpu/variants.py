"""The libraries of C kernels in a wheel: one for each kind of processor. A checkout has none.

tools/wheels.py compiles them; build.py opens the first that this processor runs.
"""

from pathlib import Path
from typing import NamedTuple

LIBRARIES = Path(__file__).with_name("libraries")
SLOW_BF16 = "slow_bf16"
"""Beside the processor's flags: it multiplies bfloat16 slower than float32."""


class Variant(NamedTuple):
    """Kernels for one kind of processor."""

    needs: tuple[str, ...]
    """Flags of the processor, by torch's names, without which an instruction may be illegal."""
    compiler_flags: tuple[str, ...]


_AVX2 = ("avx2", "fma3", "f16c", "bmi", "bmi2", "lzcnt")
_AVX512 = (*_AVX2, "avx512_f", "avx512_bw", "avx512_cd", "avx512_dq", "avx512_vl")
_VNNI = (*_AVX512, "avx512_vnni")
_BF16 = (*_VNNI, "avx512_bf16")
_AMX = (*_BF16, "amx_tile", "amx_int8", "amx_bf16")

# Without movbe, which torch does not report. Tuned for a processor: code for any is up to 1.1 times
# as slow.
_FOR_AVX2 = ("-march=x86-64-v3", "-mno-movbe", "-mtune=haswell")
_FOR_AVX512 = ("-march=x86-64-v4", "-mno-movbe", "-mtune=skylake-avx512")
_FOR_VNNI = (*_FOR_AVX512, "-mavx512vnni")
_FOR_BF16 = (*_FOR_VNNI, "-mavx512bf16")
_FOR_AMX = (*_FOR_BF16, "-mamx-tile", "-mamx-int8", "-mamx-bf16")

_X86 = {
    "amx": Variant(_AMX, _FOR_AMX),
    "avx512-slow-bf16": Variant((*_BF16, SLOW_BF16), (*_FOR_BF16, "-DSLOW_DPBF16")),
    "avx512-bf16": Variant(_BF16, _FOR_BF16),
    "avx512-vnni": Variant(_VNNI, _FOR_VNNI),
    "avx512": Variant(_AVX512, _FOR_AVX512),
    "avx2-vnni": Variant((*_AVX2, "avx_vnni"), (*_FOR_AVX2, "-mavxvnni")),
    "avx2": Variant(_AVX2, _FOR_AVX2),
}
_ARM = {
    "neon-bf16": Variant(("dot", "bf16"), ("-march=armv8.2-a+dotprod+bf16",)),
    "neon-dotprod": Variant(("dot",), ("-march=armv8.2-a+dotprod",)),
    # Outlined atomics come from the linker's own library, and with them its memcpy and expf.
    "neon": Variant((), ("-march=armv8-a", "-mno-outline-atomics")),
}
_APPLE = {
    "neon-bf16": Variant(("dot", "bf16"), ("-mcpu=apple_m2",)),
    "neon-dotprod": Variant(("dot",), ("-mcpu=apple_m1",)),
}
VARIANTS = {"x86_64": _X86, "aarch64": _ARM, "arm64": _APPLE}
"""By what the system calls the machine: variants by name, the fastest first."""
