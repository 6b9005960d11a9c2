"""Sizes and patches of pictures beside transformers' processors on Pillow."""

import random
import re
from typing import Any

import pytest
import torch
from PIL import Image
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from nanovllm.errors import CheckpointError, InvalidRequestError, UnsupportedModelError
from nanovllm.features.vision import pixels
from nanovllm.features.vision.family import Layout, View, VisionFamily
from nanovllm.features.vision.lfm2_vl import Lfm2VL
from nanovllm.features.vision.lfm3_vl import Lfm3VL
from nanovllm.features.vision.messages import Pixels
from nanovllm.features.vision.pixtral import Pixtral
from nanovllm.features.vision.qwen2_5_vl import Qwen2_5VL
from nanovllm.features.vision.rank_vision import patches_of
from tests.vision.lfm2_sizes import Lfm2Sizes
from tests.vision.pictures import noise

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
        image = noise(height, width)
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


@pytest.mark.parametrize(("made", "patch"), [(Lfm3VL, 16), (Qwen2_5VL, 14)])
def test_qwen_rules(made: type[VisionFamily], patch: int) -> None:
    limits = {"shortest_edge": 3136, "longest_edge": 60_000}
    given = made({"vision_config": {"patch_size": patch}}, {"size": limits})
    theirs = Qwen2VLImageProcessorPil(size=limits, patch_size=patch)
    for width, height in random_sizes(40, 400):
        if max(width, height) > 200 * min(width, height):
            with pytest.raises(InvalidRequestError, match="at most 200 times"):
                given.layout(width, height, {})
            continue
        image = noise(height, width)
        layout = given.layout(width, height, {})
        found = theirs([image], return_tensors="pt")
        _, rows, columns = found["image_grid_thw"][0].tolist()
        assert layout.views == (View(columns * patch, rows * patch),)
        assert layout.pieces == (rows * columns // 4,)
        torch.testing.assert_close(
            patches(given, image, layout), found["pixel_values"], **TOLERANCE
        )


@pytest.mark.parametrize(
    "sizes",
    [
        {},
        {"min_tiles": 3, "max_tiles": 7},
        {"min_image_tokens": 32, "max_image_tokens": 100, "tile_size": 256},
    ],
)
def test_lfm2_sizes(sizes: dict[str, int]) -> None:
    given = Lfm2VL({"vision_config": {"patch_size": 16}}, sizes)
    theirs = Lfm2Sizes(**sizes)
    most = theirs.sizes["max_image_tokens"]
    side = theirs.sizes["tile_size"]
    num_tiled = 0
    for width, height in random_sizes(1000, 5000):
        rows, columns = (size // 32 for size in theirs.resized(height, width))
        if rows * columns > most:
            with pytest.raises(InvalidRequestError, match="too narrow"):
                given.layout(width, height, {})
            continue
        layout = given.layout(width, height, {})
        grid = theirs.grid(height, width)
        whole = View(columns * 32, rows * 32)
        if grid is None:
            assert layout.views == (whole,)
            assert layout.pieces == ("<|image_start|>", rows * columns, "<|image_end|>")
            continue
        num_tiled += 1
        assert layout.views[-1] == whole
        assert layout.pieces[-3:] == ("<|img_thumbnail|>", rows * columns, "<|image_end|>")
        boxes = [view.box for view in layout.views[:-1]]
        assert boxes == [
            (column * side, row * side, (column + 1) * side, (row + 1) * side)
            for row in range(grid[0])
            for column in range(grid[1])
        ]
        assert {view[:2] for view in layout.views[:-1]} == {(grid[1] * side, grid[0] * side)}
        assert layout.pieces[-5:-3] == (
            f"<|img_row_{grid[0]}_col_{grid[1]}|>",
            (side // 32) ** 2,
        )
    assert num_tiled > 50


def test_lfm2_patches() -> None:
    """Tiles are parts of the picture in a larger size, and patches are theirs row by row."""
    given = Lfm2VL({"vision_config": {"patch_size": 16}}, {})
    image = noise(700, 900)
    layout = given.layout(900, 700, {})
    columns, rows = (size // 512 for size in layout.views[0][:2])
    large = image.resize((columns * 512, rows * 512), Image.Resampling.BILINEAR)
    found = patches(given, image, layout)[(columns - 1) * 1024 : columns * 1024]
    tile = torch.tensor(list(large.crop(layout.views[columns - 1].box).tobytes()))
    # Blocks of 2 x 2 patches, and the numbers of each by row, column and colour.
    expected = tile.view(16, 2, 16, 16, 2, 16, 3).permute(0, 3, 1, 4, 2, 5, 6).reshape(1024, -1)
    torch.testing.assert_close(found, (expected.double() / 127.5 - 1).float(), **TOLERANCE)


def test_lfm2_options() -> None:
    given = Lfm2VL({"vision_config": {"patch_size": 16}}, {})
    assert len(given.layout(2000, 1000, {}).views) == 9
    assert len(given.layout(2000, 1000, {"use_thumbnail": False}).views) == 8
    assert len(given.layout(2000, 1000, {"max_tiles": 4}).views) == 3
    assert given.layout(2000, 1000, {"do_image_splitting": False}).num_tokens <= 256
    with pytest.raises(InvalidRequestError, match="tile_size 500 must be a multiple of 32"):
        given.layout(2000, 1000, {"tile_size": 500})
    with pytest.raises(InvalidRequestError, match="min_tiles 3 must be at most max_tiles, 2"):
        given.layout(2000, 1000, {"min_tiles": 3, "max_tiles": 2})
    with pytest.raises(InvalidRequestError, match="use_thumbnail"):
        given.layout(2000, 1000, {"use_thumbnail": 3})


@pytest.mark.parametrize(
    ("made", "fields", "message"),
    [
        (Pixtral, {"vision_feature_layer": [-2]}, "vision_feature_layer"),
        (Pixtral, {"vision_config": {"hidden_act": "mish"}}, "hidden_act 'mish'"),
        (Pixtral, {"vision_config": {"num_attention_heads": 3}}, "multiple of its heads, 3"),
        (Pixtral, {"text_config": {}}, "text_config.hidden_size"),
        (Lfm2VL, {"projector_bias": "yes"}, "projector_bias"),
        (Lfm3VL, {"vision_config": {"num_key_value_heads": 3}}, "heads of keys, 3"),
        (Lfm3VL, {"vision_config": {"layer_types": ["conv"] * 15}}, "for each of 14 layers"),
        (Lfm3VL, {"vision_config": {"layer_types": ["mamba"] * 14}}, "must be conv or full_att"),
        (Lfm3VL, {"vision_config": {"rope_theta": 0.5}}, "rope_theta"),
        (Qwen2_5VL, {"vision_config": {"fullatt_block_indexes": [32]}}, "fullatt_block_indexes"),
    ],
)
def test_towers_that_are_refused(
    made: type[VisionFamily], fields: dict[str, Any], message: str
) -> None:
    config = {"vision_config": {"patch_size": 4}, "text_config": {"hidden_size": 64}, **fields}
    with pytest.raises((CheckpointError, UnsupportedModelError), match=re.escape(message)):
        made(config, {}).make_tower()
