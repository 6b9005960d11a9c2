"""Pictures of Qwen3-VL and Qwen3.5 and later: sizes near the picture's own, three positions."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from nanovllm.errors import CheckpointError, InvalidRequestError
from nanovllm.features.vision.family import Layout, View, VisionFamily, refuse_options
from nanovllm.features.vision.tower import (
    LearnedGrid,
    Merger,
    TowerConfig,
    VisionTower,
    axial_frequencies,
)
from nanovllm.options.validation import check_int

_MAX_RATIO = 200  # of a picture's sides


class QwenVL(VisionFamily):
    """Qwen3-VL, Qwen3.5, Qwen3.6 and Qwen3.8.

    The sides are rounded to multiples of 32 pixels, the number of pixels is kept within bounds
    (`smart_resize` of transformers' Qwen2VLImageProcessor).
    """

    marker = soft_token = "<|image_pad|>"
    placeholder = "<|vision_start|><|image_pad|><|vision_end|>"
    least, most = 65536, 16777216
    """Pixels after resizing, where the checkpoint does not say."""

    def __init__(self, config: Mapping[str, Any], processor: Mapping[str, Any]) -> None:
        super().__init__(config, processor)
        self.patch = self.size("patch_size", 16, high=256)
        self.merge = self.size("spatial_merge_size", 2, high=16)
        self.frames = self.size("temporal_patch_size", 2, high=16)
        text = config.get("text_config") or config
        rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
        self.axes = self.rope_axes(rope.get("mrope_section"))

    def rope_axes(self, sections: Sequence[int] | None) -> tuple[int, ...]:
        """Return `axes`: time, row and column in turns, then time alone."""
        _, rows, columns = sections = sections or (24, 20, 20)
        ends = {1: 3 * rows, 2: 3 * columns}
        pairs = range(sum(sections))
        return tuple(pair % 3 if pair < ends.get(pair % 3, 0) else 0 for pair in pairs)

    def limits(self, options: Mapping[str, Any]) -> tuple[int, int]:
        """Return the fewest and the most pixels after resizing."""
        size = {"shortest_edge": self.least, "longest_edge": self.most}
        size.update(self.processor.get("size") or {})
        for name, old in (("shortest_edge", "min_pixels"), ("longest_edge", "max_pixels")):
            if self.processor.get(old) is not None:
                size[name] = self.processor[old]
        where = "preprocessor_config.json: size"
        least = check_int(CheckpointError, where, size["shortest_edge"], 1)
        most = check_int(CheckpointError, where, size["longest_edge"], 1)
        refuse_options(options, "min_pixels", "max_pixels")
        least = check_int(InvalidRequestError, "min_pixels", options.get("min_pixels", least), 1)
        most = check_int(InvalidRequestError, "max_pixels", options.get("max_pixels", most), 1)
        return least, most

    def layout(self, width: int, height: int, options: Mapping[str, Any]) -> Layout:
        if max(width, height) > _MAX_RATIO * min(width, height):
            raise InvalidRequestError(
                f"a picture of {width} x {height} pixels: one side may be at most {_MAX_RATIO} "
                "times the other; cut it"
            )
        least, most = self.limits(options)
        factor = self.patch * self.merge
        rows, columns = blocks_near((height, width), factor, least, most)
        view = View(columns * factor, rows * factor)
        return Layout((view,), (rows * columns,), (rows, columns) if self.axes else (0, 0))

    def patches(self, pixels: torch.Tensor) -> torch.Tensor:
        return self.blocks(pixels).unsqueeze(2).expand(-1, -1, self.frames, -1, -1).flatten(1)

    def make_tower(self) -> VisionTower:
        config = TowerConfig(
            **self.sizes(names=("depth", "num_heads")),
            patch_shape=(3, self.frames, self.patch, self.patch),
            activation="gelu_tanh",
        )
        hidden = config.hidden_size
        output = self.size("out_hidden_size")
        group = self.merge**2
        tower = VisionTower(
            config,
            LearnedGrid(self.size("num_position_embeddings"), hidden, self.merge),
            Merger(config, group, output, config.norm(hidden, config.eps)),
            {
                index: Merger(config, group, output, config.norm(hidden * group, config.eps))
                for index in self.vision_config.get("deepstack_visual_indexes") or ()
            },
            inv_freq=axial_frequencies(config.head_dim, 10000.0),
            fused=True,
        )
        tower.places = ("model.visual.", "visual.")
        tower.names = {
            r"^patch_embed": "patch_embed.proj",
            r"^positions": "pos_embed",
            r"^layers": "blocks",
            r"\.mlp\.fc": ".mlp.linear_fc",
            r"^deepstack": "deepstack_merger_list",
        }
        return tower


def blocks_near(
    sides: tuple[int, int], factor: int, least: int, most: int, fewest: int = 0
) -> tuple[int, int]:
    """Return the rows and columns of blocks that a picture is resized to.

    Args:
        sides: height and width of the picture, in pixels.
        factor: pixels of a block's side.
        least, most: pixels of all blocks.
        fewest: blocks of a side, before the number of pixels is looked at.
    """
    height, width = (max(fewest, round(side / factor)) for side in sides)
    pixels = height * width * factor**2
    if pixels > most:
        beta = math.sqrt(math.prod(sides) / most)
        height, width = (max(1, math.floor(side / beta / factor)) for side in sides)
    elif pixels < least:
        beta = math.sqrt(least / math.prod(sides))
        height, width = (math.ceil(side * beta / factor) for side in sides)
    return height, width
