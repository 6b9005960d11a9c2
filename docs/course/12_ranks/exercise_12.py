"""Exercise 12: divide attention between ranks."""

from collections.abc import Callable

import torch
from torch.nn.functional import scaled_dot_product_attention

HEAD = 8
"""Numbers of a head."""


def shard(weights: dict[str, torch.Tensor], rank: int, size: int) -> dict[str, torch.Tensor]:
    """Return a rank's part of the four matrices of an attention layer.

    The layer computes q, k and v as `x @ weight.T`, so each row of these weights makes one number
    of the result. Attention then treats each head alone: HEAD numbers that lie side by side, and so
    HEAD rows of q, k and v. The results of all heads, side by side, are multiplied by o in the same
    way; there each *column* reads one of these numbers.

    Each rank gets equally many heads, the first rank the first ones: their rows of q, k and v, and
    the columns of o that read them. Then the outputs of all ranks add up to the layer's.

    Args:
        weights: "q", "k", "v" and "o", each [heads * HEAD, heads * HEAD].
        rank: from 0 to size - 1.
        size: number of ranks. It divides the number of heads.
    """
    raise NotImplementedError("write shard")


def attention(x: torch.Tensor, weights: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the output of a layer, or of a rank's part of it, for tokens x [tokens, hidden]."""
    q, k, v = (
        (x @ weights[name].T).view(len(x), -1, HEAD).transpose(0, 1) for name in ("q", "k", "v")
    )
    heads = scaled_dot_product_attention(q, k, v, is_causal=True)
    return heads.transpose(0, 1).reshape(len(x), -1) @ weights["o"].T


def check(shard: Callable[..., dict[str, torch.Tensor]]) -> None:
    """Raise AssertionError if `shard` does not do what its docstring says."""
    torch.manual_seed(0)
    weights = {name: torch.randn(32, 32) / 6 for name in "qkvo"}
    x = torch.randn(5, 32)
    whole = attention(x, weights)
    for size in (1, 2, 4):
        total = torch.zeros_like(whole)
        wrong: list[str] = []
        for rank in range(size):
            part = shard(dict(weights), rank, size)
            assert isinstance(part, dict), f"shard returned {part!r}, not a dictionary"
            shapes = {name: list(weight.shape) for name, weight in part.items()}
            rows, columns = [32 // size, 32], [32, 32 // size]
            wanted = {"q": rows, "k": rows, "v": rows, "o": columns}
            assert shapes == wanted, f"rank {rank} of {size} has {shapes}, not {wanted}"
            total += attention(x, part)
            lines = [*range(rank * 32 // size, (rank + 1) * 32 // size)]
            for name, weight in part.items():
                kind = "columns" if name == "o" else "rows"
                if (found := lines_of(weights[name], weight, kind)) != lines:
                    wrong.append(f"rank {rank} has {kind} {found} of {name}, not {lines}")
        error = (total - whole).abs().max().item()
        assert not wrong, f"{size} ranks: {wrong[0]}; the sum is off by up to {error:.3f}"


def lines_of(weight: torch.Tensor, part: torch.Tensor, kind: str) -> list[int | None]:
    """Return which rows or columns of a weight a part has; None for one that is none of them."""
    if kind == "columns":
        weight, part = weight.T, part.T
    return [
        next((i for i, line in enumerate(weight) if torch.equal(line, mine)), None) for mine in part
    ]


if __name__ == "__main__":
    check(shard)
    print("solved")
