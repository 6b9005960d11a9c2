"""Attention written out in plain torch, for what scaled_dot_product_attention does not compute."""

import torch


def explicit_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor,
    scale: float,
    softcap: float,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Return attention of q [..., H, n, D] over k and v [..., KV, m, D]: [..., H, n, D].

    Args:
        mask: bool, true for the keys that a query sees; its shape broadcasts to [..., H, n, m].
        softcap, sinks: see `AttentionSpec`.
    """
    group = q.shape[-3] // k.shape[-3]
    k, v = k.repeat_interleave(group, -3), v.repeat_interleave(group, -3)
    scores = (q.float() @ k.float().mT) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~mask, -torch.inf)
    if sinks is not None:
        columns = sinks.float()[:, None, None].expand(*scores.shape[:-1], 1)
        weights = torch.cat([scores, columns], -1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    return (weights @ v.float()).to(q.dtype)
