"""Makes Triton's interpreter run loops whose bounds a kernel computes, and round to FP8."""

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

_patch_lang_tensor = interpreter._patch_lang_tensor
_convert_float = interpreter._convert_float


def allow_computed_bounds():
    """Triton 3.6 calls int() on arrays of one element, which numpy refuses from 2.4 on."""
    interpreter._patch_lang_tensor = _patch_tensor_and_index


def _patch_tensor_and_index(tensor, scope):
    _patch_lang_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())


def round_to_fp8():
    """Triton 3.6 halves what rounds up to a power of two, and cuts the smallest numbers."""
    interpreter._convert_float = _convert_float_or_fp8


def _convert_float_or_fp8(data, from_dtype, to_dtype, rounding_mode):
    if (from_dtype, to_dtype) != (tl.float32, tl.float8e4nv):
        return _convert_float(data, from_dtype, to_dtype, rounding_mode)
    rounded = torch.from_numpy(np.ascontiguousarray(data)).to(torch.float8_e4m3fn)
    return rounded.view(torch.uint8).numpy()
