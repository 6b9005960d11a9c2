"""Solution 11."""


def quantize(weights: list[float]) -> tuple[float, list[int]]:
    scale = max(weights, key=abs) / -8
    if scale == 0:
        return 0.0, [0] * len(weights)
    return scale, [min(7, round(weight / scale)) for weight in weights]
