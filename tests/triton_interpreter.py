"""Makes Triton's interpreter run loops whose bounds a kernel computes."""

from triton.runtime import interpreter

_patch_lang_tensor = interpreter._patch_lang_tensor


def allow_computed_bounds():
    """Triton 3.6 calls int() on arrays of one element, which numpy refuses from 2.4 on."""
    interpreter._patch_lang_tensor = _patch_tensor_and_index


def _patch_tensor_and_index(tensor, scope):
    _patch_lang_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())
