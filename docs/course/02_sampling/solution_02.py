"""Solution 2."""

import math


def probabilities(logits: list[float], temperature: float, top_k: int, top_p: float) -> list[float]:
    order = sorted(range(len(logits)), key=lambda token: -logits[token])
    if top_k:
        order = order[:top_k]
    largest = logits[order[0]]
    weights = {token: math.exp((logits[token] - largest) / temperature) for token in order}
    total = sum(weights.values())
    kept: dict[int, float] = {}
    for token in order:
        if sum(kept.values()) >= top_p:
            break
        kept[token] = weights[token] / total
    return [kept.get(token, 0.0) / sum(kept.values()) for token in range(len(logits))]
