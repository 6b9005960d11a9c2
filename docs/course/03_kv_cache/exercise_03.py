"""Exercise 3: attention for one new token, with the keys and values of those before it cached."""

from collections.abc import Callable

import torch
from torch.nn.functional import scaled_dot_product_attention


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cache: list[tuple[torch.Tensor, torch.Tensor]],
) -> torch.Tensor:
    """Return the output of attention for the newest token of a text, [size].

    This is one head; `size` is how many numbers its rows have (32 in the lesson).

    1. Append (key, value) to the cache: later tokens will read them.
    2. The score of each token in the cache is the dot product of `query` and its key, divided by
       the square root of `size`.
    3. Softmax makes weights of the scores (`torch.softmax`), which are 1 together.
    4. The output is the sum of all values in the cache, each times its token's weight.

    Args:
        query, key, value: of the newest token, each [size].
        cache: (key, value) of each token before it, in order. It is changed.
    """
    raise NotImplementedError("write attend")


def check(attend: Callable[..., torch.Tensor]) -> None:
    """Raise AssertionError if `attend` does not do what its docstring says."""
    torch.manual_seed(0)
    queries, keys, values = torch.randn(3, 6, 8)  # six tokens of size 8
    wanted = scaled_dot_product_attention(queries[None], keys[None], values[None], is_causal=True)
    cache: list[tuple[torch.Tensor, torch.Tensor]] = []
    for position in range(6):
        found = attend(queries[position], keys[position], values[position], cache)
        assert isinstance(found, torch.Tensor), f"attend returned {found!r} and no tensor"
        assert found.shape == (8,), f"the output has shape {list(found.shape)}, not [8]"
        assert len(cache) == position + 1, (
            f"after token {position} the cache has {len(cache)} entries, not {position + 1}"
        )
        assert torch.allclose(found, wanted[0, position], atol=1e-5), (
            f"token {position}: {found.tolist()}, but torch's attention over the whole text "
            f"gives {wanted[0, position].tolist()}"
        )
    for position, (key, value) in enumerate(cache):
        assert torch.equal(key, keys[position]), f"entry {position} of the cache has another key"
        assert torch.equal(value, values[position]), f"entry {position} has another value"


if __name__ == "__main__":
    check(attend)
    print("solved")
