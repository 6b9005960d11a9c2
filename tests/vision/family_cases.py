"""The families that tests/vision/test_tower_families.py compares with transformers."""

import functools
import itertools
from collections.abc import Sequence as Seq
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import (
    Lfm2VlConfig,
    Lfm3VlConfig,
    Mistral3Config,
    Qwen2_5_VLConfig,
    Qwen3VLMoeConfig,
)
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from tests.vision.asking import SOFT, TEXT, Case
from tests.vision.lfm2_sizes import Lfm2Sizes

PIXTRAL = {"size": {"longest_edge": 60}, "patch_size": 4}


def _read_pixtral(pictures: Seq[Image.Image]) -> tuple[dict[str, Any], list[str]]:
    processor = PixtralImageProcessorPil(size=PIXTRAL["size"], patch_size=8)
    found = processor(list(pictures), return_tensors="pt")
    texts = []
    for height, width in found["image_sizes"]:
        row = "[IMG]" * (int(width) // 8)
        texts.append("[IMG_BREAK]".join([row] * (int(height) // 8)) + "[IMG_END]")
    return dict(found), texts


def _pixtral() -> Mistral3Config:
    return Mistral3Config(
        text_config={**TEXT, "model_type": "mistral", "tie_word_embeddings": False},
        vision_config={
            "model_type": "pixtral",
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 3,
            "num_attention_heads": 2,
            "patch_size": 4,
            "image_size": 60,
            "hidden_act": "gelu",
            "rope_parameters": {"rope_type": "axial", "rope_theta": 10000.0},
        },
        image_token_index=SOFT,
        spatial_merge_size=2,
        tie_word_embeddings=False,
    )


QWEN = {
    "size": {"shortest_edge": 64, "longest_edge": 2000},
    "patch_size": 4,
    "merge_size": 2,
    "temporal_patch_size": 2,
}
_QWEN_TOKENS = ("<|vision_start|>", "<|vision_end|>")
_QWEN_PICTURE = "<|vision_start|><|image_pad|><|vision_end|>"


QWEN_3 = {**QWEN, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}


def _read_qwen(
    pictures: Seq[Image.Image], processor: dict[str, Any] = QWEN
) -> tuple[dict[str, Any], list[str]]:
    found = Qwen2VLImageProcessorPil(**processor)(list(pictures), return_tensors="pt")
    numbers = [int(grid.prod()) // 4 for grid in found["image_grid_thw"]]
    return dict(found), ["<|image_pad|>" * number for number in numbers]


def _lfm3() -> Lfm3VlConfig:
    return Lfm3VlConfig(
        text_config={
            **TEXT,
            "model_type": "lfm3",
            "layer_types": ["conv", "full_attention", "conv", "sliding_attention"],
            "sliding_window": 24,
        },
        vision_config={
            "hidden_size": 64,
            "intermediate_size": 48,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "layer_types": ["conv", "full_attention", "conv", "full_attention"],
            "patch_size": 4,
        },
        projector_hidden_size=40,
        image_token_id=SOFT,
        video_token_id=SOFT + 1,
    )


def _qwen2_5() -> Qwen2_5_VLConfig:
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
    return Qwen2_5_VLConfig(
        text_config={**TEXT, "rope_parameters": rope},
        vision_config={
            "hidden_size": 32,
            "intermediate_size": 48,
            "depth": 3,
            "num_heads": 2,
            "patch_size": 4,
            "out_hidden_size": 64,
            "window_size": 16,
            "fullatt_block_indexes": [1],
        },
        image_token_id=SOFT,
        video_token_id=159,
        vision_start_token_id=SOFT + 1,
        vision_end_token_id=SOFT + 2,
        tie_word_embeddings=False,
    )


def _qwen3_moe() -> Qwen3VLMoeConfig:
    sections = {"mrope_section": [4, 2, 2], "mrope_interleaved": True}
    return Qwen3VLMoeConfig(
        text_config={
            **TEXT,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, **sections},
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
        },
        vision_config={
            "hidden_size": 32,
            "intermediate_size": 48,
            "depth": 3,
            "num_heads": 2,
            "patch_size": 4,
            "out_hidden_size": 64,
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": [0, 1],
        },
        image_token_id=SOFT,
        video_token_id=159,
        vision_start_token_id=SOFT + 1,
        vision_end_token_id=SOFT + 2,
        tie_word_embeddings=False,
    )


LFM2 = {
    "min_image_tokens": 4,
    "max_image_tokens": 16,
    "max_tiles": 6,
    "tile_size": 32,
    "image_mean": [0.5] * 3,
    "image_std": [0.5] * 3,
}
_TILES = tuple(f"<|img_row_{row}_col_{column}|>" for row in range(1, 7) for column in range(1, 7))
_LFM2_TOKENS = ("<|image_start|>", "<|image_end|>", "<|img_thumbnail|>", *_TILES)


def _read_lfm2(pictures: Seq[Image.Image]) -> tuple[dict[str, Any], list[str]]:
    """Do what transformers' processor does, on Pillow: it has none."""
    sizes = Lfm2Sizes(**LFM2, encoder_patch_size=4)
    views: list[Image.Image] = []
    texts = []
    for picture in pictures:
        height, width = sizes.resized(picture.height, picture.width)
        text = ""
        if grid := sizes.grid(picture.height, picture.width):
            rows, columns = grid
            large = picture.resize((columns * 32, rows * 32), Image.Resampling.BILINEAR)
            for row, column in itertools.product(range(rows), range(columns)):
                left, upper = column * 32, row * 32
                views.append(large.crop((left, upper, left + 32, upper + 32)))
                text += f"<|img_row_{row + 1}_col_{column + 1}|>" + "<image>" * 16
            text += "<|img_thumbnail|>"
        views.append(picture.resize((width, height), Image.Resampling.BILINEAR))
        text += "<image>" * (height * width // 64)
        texts.append(f"<|image_start|>{text}<|image_end|>")
    shapes = [(view.height // 4, view.width // 4) for view in views]
    values = torch.zeros(len(views), 64, 48)
    mask = torch.zeros(len(views), 64, dtype=torch.long)
    for index, (view, (rows, columns)) in enumerate(zip(views, shapes, strict=True)):
        numbers = torch.from_numpy(np.array(view)).float() / 255 * 2 - 1
        patches = numbers.view(rows, 4, columns, 4, 3).transpose(1, 2).reshape(rows * columns, -1)
        values[index, : len(patches)] = patches
        mask[index, : len(patches)] = 1
    inputs = {"pixel_values": values, "pixel_attention_mask": mask}
    return {**inputs, "spatial_shapes": torch.tensor(shapes)}, texts


def _lfm2() -> Lfm2VlConfig:
    return Lfm2VlConfig(
        text_config={
            **TEXT,
            "model_type": "lfm2",
            "layer_types": ["conv", "full_attention", "conv", "full_attention"],
            "block_multiple_of": 8,
        },
        vision_config={
            "model_type": "siglip2_vision_model",
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "patch_size": 4,
            "num_patches": 36,
            "vision_use_head": False,
        },
        projector_hidden_size=40,
        image_token_id=SOFT,
    )


CASES = {
    "pixtral": Case(
        _pixtral, PIXTRAL, "[IMG]", "[IMG]", ("[IMG_BREAK]", "[IMG_END]"), _read_pixtral
    ),
    "lfm3": Case(_lfm3, QWEN, "<|image_pad|>", _QWEN_PICTURE, _QWEN_TOKENS, _read_qwen),
    "lfm2": Case(_lfm2, LFM2, "<image>", "<image>", _LFM2_TOKENS, _read_lfm2),
    "qwen2.5": Case(_qwen2_5, QWEN, "<|image_pad|>", _QWEN_PICTURE, _QWEN_TOKENS, _read_qwen),
    "qwen3-moe": Case(
        _qwen3_moe,
        QWEN_3,
        "<|image_pad|>",
        _QWEN_PICTURE,
        _QWEN_TOKENS,
        functools.partial(_read_qwen, processor=QWEN_3),
    ),
}
