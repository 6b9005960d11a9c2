"""Patches of Triton's interpreter, which correct three defects and make it faster."""

import functools

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

_patch_lang = interpreter._patch_lang
_patch_lang_tensor = interpreter._patch_lang_tensor
_convert_float = interpreter._convert_float
_create_dot = interpreter.InterpreterBuilder.create_dot


def patch_interpreter():
    """Apply the patches to the whole process. Calling this again changes nothing."""
    interpreter._patch_lang = _patch_lang_once
    interpreter._patch_lang_tensor = _patch_tensor_and_index
    interpreter._convert_float = _convert_float_or_fp8
    interpreter.InterpreterBuilder.create_dot = _dot_of_floats


def _patch_lang_once(fn):
    """Replace Triton's functions by interpreted ones, unless this launch has done so already.

    The interpreter does this at each launch, and again at each call from one jitted function to
    another. That took 40% of the time of test_sampling.py.
    """
    if any(tl.core.is_builtin(module.load) for module in _language_modules(fn)):
        return _patch_lang(fn)
    return interpreter._LangPatchScope()


@functools.cache
def _language_modules(fn):
    """Return those of Triton's language modules that `fn` can see."""
    seen = fn.__globals__.values()
    return [module for module in (tl, tl.core) if any(value is module for value in seen)]


def _patch_tensor_and_index(tensor, scope):
    """Let loops have bounds that a kernel computes.

    Triton 3.6 calls int() on arrays of one element, which numpy refuses from version 2.4 on.
    """
    _patch_lang_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())


def _convert_float_or_fp8(data, from_dtype, to_dtype, rounding_mode):
    """Round float32 to float8_e4m3fn correctly.

    Triton 3.6 and 3.7 lose the carry where a value rounds up to a power of two, and flush the
    smallest values to 0.
    """
    if (from_dtype, to_dtype) != (tl.float32, tl.float8e4nv):
        return _convert_float(data, from_dtype, to_dtype, rounding_mode)
    rounded = torch.from_numpy(np.ascontiguousarray(data)).to(torch.float8_e4m3fn)
    return rounded.view(torch.uint8).numpy()


def _dot_of_floats(self, a, b, *args):
    """Multiply bfloat16 as the numbers they are. Triton takes their bits for integers."""
    a, b = (_widened(x) if x.dtype == tl.bfloat16 else x for x in (a, b))
    return _create_dot(self, a, b, *args)


def dot_in_float64(self, a, b, d, *args):
    """Multiply in float64 and round, for tests that compare bits of rows.

    numpy's float32 product adds up a row in an order that, on some processors, depends on the row's
    place in the tile.
    """
    product = np.matmul(_in_float64(a), _in_float64(b)).astype(d.data.dtype)
    return interpreter.TensorHandle(product + d.data, d.dtype.scalar)


def _in_float64(x):
    data = _widened(x).data if x.dtype == tl.bfloat16 else x.data
    if x.dtype == tl.float8e4nv:
        data = interpreter._convert_float(data, x.dtype, tl.float16, None).view(np.float16)
    return data.astype(np.float64)


def _widened(x):
    bits = x.data.astype(np.uint32) << 16
    return interpreter.TensorHandle(bits.view(np.float32), tl.float32)
