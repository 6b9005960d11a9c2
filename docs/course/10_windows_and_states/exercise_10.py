"""Exercise 10: a layer whose memory does not grow."""

from collections.abc import Callable

import torch


def step(
    state: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, decay: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the state after one more token, and the layer's output for that token, [size].

    Attention without softmax would give a token the sum, over all tokens up to itself, of
    (its query . their key) * their value, with a dot product. Here older tokens also fade: one that
    is n tokens back counts decay ** n times. That sum needs no list of tokens. It is the query
    times a matrix, the sum of the tokens' outer products key x value (`torch.outer`), and that is
    the state:

    1. The state fades: multiply it by `decay`.
    2. Add the outer product of the new key and value, [size, size].
    3. The output is `query @ state`.

    Args:
        state: [size, size], of the tokens before this one; zeros before the first. Another sequence
            may have a copy of it: leave this tensor as it is, and return a new one.
        query, key, value: of the new token, each [size].
    """
    raise NotImplementedError("write step")


def check(step: Callable[..., tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Raise AssertionError if `step` does not do what its docstring says."""
    torch.manual_seed(0)
    queries, keys, values = torch.randn(3, 9, 4)
    state = torch.zeros(4, 4)
    for position in range(9):
        before = state.clone()
        token = queries[position], keys[position], values[position]
        result = step(state, *token, 0.9)
        assert isinstance(result, tuple), f"step returned {result!r}, not (state, output)"
        assert torch.equal(state, before), "the state that was given has been changed"
        state, output = result
        assert state.shape == (4, 4), f"the state has shape {list(state.shape)}, not [4, 4]"
        wanted = sum(
            (
                0.9 ** (position - earlier) * queries[position].dot(keys[earlier]) * values[earlier]
                for earlier in range(position + 1)
            ),
            torch.zeros(4),
        )
        assert torch.allclose(output, wanted, atol=1e-4), (
            f"token {position}: {output.tolist()}, but the sum over all tokens {wanted.tolist()}"
        )


if __name__ == "__main__":
    check(step)
    print("solved")
