"""The families that tests/vision/test_tower_families.py compares with transformers."""

from collections.abc import Sequence as Seq
from typing import Any

from PIL import Image
from transformers import Mistral3Config
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil

from tests.vision.pictured import SOFT, TEXT, Case

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


CASES = {
    "pixtral": Case(_pixtral, PIXTRAL, "[IMG]", ("[IMG_BREAK]", "[IMG_END]"), _read_pixtral),
}
