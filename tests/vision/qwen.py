"""Random Qwen3-VL and Qwen3.5 models, and what transformers computes of them."""

from collections.abc import Mapping, Sequence as Seq
from typing import Any

import torch
from PIL import Image
from transformers import (
    PreTrainedModel,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from tests.vision.pictures import PARAMS, randomized

PAD = "<|image_pad|>"
SPECIAL = ("<|vision_start|>", "<|vision_end|>", PAD, "<|video_pad|>")
PICTURE = f"<|vision_start|>{PAD}<|vision_end|>"
PROCESSOR: dict[str, Any] = {
    "size": {"shortest_edge": 64, "longest_edge": 6000},
    "patch_size": 4,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "image_mean": [0.5, 0.4, 0.3],
    "image_std": [0.5, 0.6, 0.7],
}
TEMPLATE = """
{%- macro shown(content) -%}
{%- if content is string %}{{ content }}
{%- else %}
{%- for part in content %}
{%- if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>
{%- else %}{{ part.text }}
{%- endif %}
{%- endfor %}
{%- endif %}
{%- endmacro %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ shown(message.content) }}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
_TEXT = {
    "vocab_size": 1030,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": None,
}
_TOWER = {
    "depth": 3,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "patch_size": 4,
    "out_hidden_size": 64,
    "num_position_embeddings": 64,
}
_STATES = {
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}


def make_model(kind: str, ids: Mapping[str, int]) -> PreTrainedModel:
    """Return a model of "qwen3_vl" or "qwen3_5"."""
    tokens = {
        "image_token_id": ids[PAD],
        "video_token_id": ids["<|video_pad|>"],
        "vision_start_token_id": ids["<|vision_start|>"],
        "vision_end_token_id": ids["<|vision_end|>"],
    }
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_interleaved": True}
    if kind == "qwen3_vl":
        text = {**_TEXT, "head_dim": 16, "rope_parameters": {**rope, "mrope_section": [4, 2, 2]}}
        tower = {**_TOWER, "deepstack_visual_indexes": [0, 1]}
        config: Any = Qwen3VLConfig(text_config=text, vision_config=tower, **tokens)
        return randomized(Qwen3VLForConditionalGeneration(config))
    rope |= {"mrope_section": [2, 1, 1], "partial_rotary_factor": 0.25}
    text = {**_TEXT, **_STATES, "rope_parameters": rope}
    config = Qwen3_5Config(text_config=text, vision_config=_TOWER, **tokens)
    return randomized(Qwen3_5ForConditionalGeneration(config))


def processed(pictures: Seq[Image.Image], **options: Any) -> Any:
    """Return the pixel_values and grids of transformers' processor on Pillow."""
    processor = Qwen2VLImageProcessorPil(**{**PROCESSOR, **options})
    return processor(list(pictures), return_tensors="pt")


@torch.no_grad()
def by_transformers(
    model: PreTrainedModel, token_ids: Seq[int], pictures: Seq[Image.Image]
) -> tuple[list[int], float, torch.Tensor]:
    """Return greedy tokens, the sum of their log-probabilities, and the prompt's last logits."""
    found = processed(pictures)
    ids = torch.tensor([token_ids])
    given = {
        "input_ids": ids,
        "pixel_values": found["pixel_values"],
        "image_grid_thw": found["image_grid_thw"],
        "mm_token_type_ids": (ids == model.config.image_token_id).long(),
    }
    output = model.generate(
        **given,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=PARAMS.max_tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    tokens = output.sequences[0, len(token_ids) :].tolist()
    scores = [each[0].log_softmax(-1) for each in output.logits]
    total = sum(float(score[token]) for score, token in zip(scores, tokens, strict=True))
    return tokens, total, output.logits[0][0]
