"""Solution 3."""

import torch


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cache: list[tuple[torch.Tensor, torch.Tensor]],
) -> torch.Tensor:
    cache.append((key, value))
    keys = torch.stack([key for key, _ in cache])
    values = torch.stack([value for _, value in cache])
    weights = torch.softmax(keys @ query / len(query) ** 0.5, dim=0)
    return weights @ values
