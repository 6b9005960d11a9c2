"""Exercise 11: round a group of weights to 4 bits."""

import random
from collections.abc import Callable

import torch

from nanovllm.features.quantization import integer


def quantize(weights: list[float]) -> tuple[float, list[int]]:
    """Return a scale and an integer from -8 to 7 for each weight; integer * scale restores it.

    - The weight furthest from 0 becomes -8, so the scale is that weight divided by -8. (If it is
      positive, the scale is negative, and all other signs change with it.)
    - The other weights are divided by the scale and rounded to the nearest integer, with `round`.
      What comes out above 7 becomes 7.
    - If all weights are 0, the scale is 0 and so are the integers.
    """
    raise NotImplementedError("write quantize")


def check(quantize: Callable[..., tuple[float, list[int]]]) -> None:
    """Raise AssertionError if `quantize` does not do what its docstring says."""
    for weights, wanted in (
        ([-0.8, 0.1, 0.31, -0.62], (0.1, [-8, 1, 3, -6])),
        ([0.8, 0.1, 0.31, -0.62], (-0.1, [-8, -1, -3, 6])),
        ([-0.8, 0.79], (0.1, [-8, 7])),
        ([0.0, 0.0], (0.0, [0, 0])),
    ):
        found = quantize(list(weights))
        assert isinstance(found, tuple), f"{weights}: {found!r}, not (scale, integers)"
        scale, integers = found
        assert abs(scale - wanted[0]) < 1e-9, f"{weights}: scale {scale}, not {wanted[0]}"
        assert list(integers) == wanted[1], f"{weights}: integers {integers}, not {wanted[1]}"

    chance = random.Random(0)
    for _ in range(50):
        weights = [chance.gauss(0, 0.1) for _ in range(32)]
        rounded = integer.quantize(torch.tensor([weights]), bits=4, group_size=32)
        scale, integers = quantize(list(weights))
        engine_scale = rounded.scales[0, 0].item()  # in 16 bits, so rounded itself
        assert abs(scale - engine_scale) < 1e-3 * abs(scale), f"{scale}, the engine {engine_scale}"
        engine_integers = rounded.values[0].tolist()
        far = [
            (weight, mine, other)
            for weight, mine, other in zip(weights, integers, engine_integers, strict=True)
            if mine != other and abs(abs(weight / scale) % 1 - 0.5) > 0.01  # not just between two
        ]
        assert not far, f"scale {scale}: (weight, yours, the engine's) {far[0]}"


if __name__ == "__main__":
    check(quantize)
    print("solved")
