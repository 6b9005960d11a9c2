"""Sizes and patches of pictures beside transformers' processors on Pillow."""

import random
from typing import Any

import pytest
import torch
from PIL import Image
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil

from nanovllm.errors import InvalidRequestError
from nanovllm.features.vision import pixels
from nanovllm.features.vision.family import Layout, VisionFamily
from nanovllm.features.vision.messages import Pixels
from nanovllm.features.vision.pixtral import Pixtral
from nanovllm.features.vision.rank_vision import patches_of
from tests.vision.pictured import noise

TOLERANCE: dict[str, Any] = {"rtol": 2e-7, "atol": 2e-7}


def random_sizes(number: int, most: int) -> list[tuple[int, int]]:
    """Return widths and heights, some of them extreme."""
    rng = random.Random(0)
    sizes = [(1, 1), (1, 60), (60, 1), (most, most), (most, 2 * most)]
    exponents = [(rng.random(), rng.random()) for _ in range(number - len(sizes))]
    return sizes + [(int(most**first), int(most**second)) for first, second in exponents]


def patches(given: VisionFamily, image: Image.Image, layout: Layout) -> torch.Tensor:
    """Return all patches of a picture, view after view."""
    parts = pixels.resized(image, layout.views, given.resample)
    found = []
    for view, rgb in zip(layout.views, parts, strict=True):
        width, height = view.size
        found.append(patches_of(Pixels(height, width, rgb, 0), given))
    return torch.cat(found)


def test_pixtral() -> None:
    vision = {"patch_size": 14, "image_size": 1540}
    given = Pixtral({"vision_config": vision}, {"size": {"longest_edge": 300}})
    theirs = PixtralImageProcessorPil(size={"longest_edge": 300}, patch_size=28)
    for width, height in random_sizes(60, 500):
        if max(width, height) > 300 * min(width, height):
            with pytest.raises(InvalidRequestError, match="at most 300 times"):
                given.layout(width, height, {})
            continue
        image = noise(width, height)
        layout = given.layout(width, height, {})
        found = theirs([image], return_tensors="pt")
        rows, columns = (int(side) // 28 for side in found["image_sizes"][0])
        assert layout.pieces == (columns, "[IMG_BREAK]") * (rows - 1) + (columns, "[IMG_END]")
        blocks = found["pixel_values"][0].reshape(3, rows, 2, 14, columns, 2, 14)
        expected = blocks.permute(1, 4, 2, 5, 0, 3, 6).reshape(rows * columns * 4, -1)
        torch.testing.assert_close(patches(given, image, layout), expected, **TOLERANCE)


def test_pixtral_smaller() -> None:
    given = Pixtral({"vision_config": {"patch_size": 14, "image_size": 1540}}, {})
    assert given.layout(1540, 770, {}).num_tokens == 55 * 28
    assert given.layout(1540, 770, {"longest_edge": 280}).num_tokens == 10 * 5
    with pytest.raises(InvalidRequestError, match="longest_edge"):
        given.layout(8, 8, {"longest_edge": 0})
    with pytest.raises(InvalidRequestError, match="max_pixels"):
        given.layout(8, 8, {"max_pixels": 4})
