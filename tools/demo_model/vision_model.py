"""The demo model that sees: its files, its random weights, and what its tower computes in batches.

It is a Qwen3.5 whose text layers all have attention.
"""

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.nn.functional import linear
from transformers import PreTrainedTokenizerFast, Qwen3_5Config, Qwen3_5ForConditionalGeneration
from transformers.models.qwen3_5.modeling_qwen3_5 import (
    Qwen3_5VisionAttention,
    apply_rotary_pos_emb_vision,
)

from tools.demo_model.checkpoint import (
    CONTROL_TOKENS,
    MODEL_CONFIG,
    train_tokenizer,
    write_configs,
    write_json,
    write_tokenizer,
)
from tools.demo_model.scene_questions import BLIND, Questions
from tools.demo_model.scenes import random_scene

PAD = "<|image_pad|>"
PICTURE = f"<|vision_start|>{PAD}<|vision_end|>"
SIDE, PATCH, MERGE = 96, 8, 2
CELLS = SIDE // PATCH // MERGE
"""Cells of a side: one is a soft token."""
WIDTH = 128
VOCAB_SIZE = 496
SYSTEM = "You are a helpful assistant."

TEXT: dict[str, Any] = {
    "model_type": "qwen3_5_text",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": WIDTH,
    "intermediate_size": 160,
    "num_hidden_layers": 4,
    "layer_types": ["full_attention"] * 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": MODEL_CONFIG["max_position_embeddings"],
    "tie_word_embeddings": True,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1000.0,
        "partial_rotary_factor": 0.5,
        "mrope_interleaved": True,
        "mrope_section": [4, 2, 2],
    },
}
TOWER: dict[str, Any] = {
    "model_type": "qwen3_5_vision",
    "depth": 4,
    "hidden_size": 128,
    "intermediate_size": 224,
    "num_heads": 4,
    "patch_size": PATCH,
    "spatial_merge_size": MERGE,
    "temporal_patch_size": 2,
    "out_hidden_size": WIDTH,
    "num_position_embeddings": (SIDE // PATCH) ** 2,
}
PROCESSOR: dict[str, Any] = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "size": {"shortest_edge": SIDE**2, "longest_edge": SIDE**2},
    "patch_size": PATCH,
    "merge_size": MERGE,
    "temporal_patch_size": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}


TEMPLATE = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.content is string %}
        {{- message.content }}
    {%- else %}
        {%- for part in message.content if part.type == 'image' %}
            {{- '<|vision_start|><|image_pad|><|vision_end|>' }}
        {%- endfor %}
        {%- for part in message.content if part.type != 'image' %}
            {{- part.text }}
        {%- endfor %}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


def write_files(out: Path, seed: int) -> tuple[PreTrainedTokenizerFast, Qwen3_5Config]:
    """Write all files but the weights; return the tokenizer and the configuration."""
    questions = Questions(random.Random(seed))
    asked = [questions.ask(random_scene(questions.rng)) for _ in range(4000)]
    texts = [f"user\n{each.text}\n\nassistant\n{each.answer}" for each in asked]
    texts += [SYSTEM, BLIND] * 20
    special = ("<|vision_start|>", "<|vision_end|>", PAD, "<|video_pad|>")
    made = train_tokenizer(texts, VOCAB_SIZE, CONTROL_TOKENS + special)
    write_tokenizer(out, made, TEMPLATE)
    write_json(out / "preprocessor_config.json", PROCESSOR)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(out)
    start, end, soft, video = tokenizer.convert_tokens_to_ids(special)
    config = {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "text_config": TEXT,
        "vision_config": TOWER,
        "tie_word_embeddings": True,
        "dtype": "bfloat16",
        "vision_start_token_id": start,
        "vision_end_token_id": end,
        "image_token_id": soft,
        "video_token_id": video,
    }
    return tokenizer, Qwen3_5Config(**write_configs(out, tokenizer, config))


def make_model(
    tokenizer: PreTrainedTokenizerFast, config: Qwen3_5Config, words: dict[str, torch.Tensor]
) -> Qwen3_5ForConditionalGeneration:
    """Return a model with random weights, where tokens begin with the vectors of their words."""
    model = Qwen3_5ForConditionalGeneration(config).float()
    model.set_attn_implementation("eager")  # torch's fused attention is slow backwards on CPUs
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "embed" in name and "proj" not in name:
                parameter.normal_(0, WIDTH**-0.5)
            elif parameter.ndim > 1:
                parameter.normal_(0, parameter[0].numel() ** -0.5)
            elif name.endswith(("q_norm.weight", "k_norm.weight")):
                parameter.fill_(0.4)
        for index, row in enumerate(model.model.language_model.embed_tokens.weight):
            word = tokenizer.decode([index]).strip().lower().replace("color", "colour")
            for form in (word, word.removesuffix("s"), word.removesuffix("es")):
                if form in words:
                    row.mul_(0.3).add_(words[form])
                    break
    return model


def patches(images: list[Image.Image]) -> torch.Tensor:
    """Return pictures as Qwen's processor does: [number, patches, 3 * 2 * PATCH * PATCH]."""
    shrunk = [image.resize((SIDE, SIDE), Image.Resampling.BICUBIC) for image in images]
    pixels = torch.from_numpy(np.stack([np.asarray(image) for image in shrunk]))
    pixels = pixels.float() / 127.5 - 1
    blocks = pixels.view(len(images), CELLS, MERGE, PATCH, CELLS, MERGE, PATCH, 3)
    blocks = blocks.permute(0, 1, 4, 2, 5, 7, 3, 6).unsqueeze(6).expand(*[-1] * 6, 2, -1, -1)
    return blocks.reshape(len(images), -1, 3 * 2 * PATCH * PATCH)


def see(model: Qwen3_5ForConditionalGeneration, pixels: torch.Tensor) -> torch.Tensor:
    """Return the features of pictures of equal size: what `model.model.visual` returns, in one
    batch. [number, cells, WIDTH].
    """
    tower = model.model.visual
    number, length, _ = pixels.shape
    order = torch.arange(length).view(CELLS, MERGE, CELLS, MERGE).permute(0, 2, 1, 3).flatten()
    side = CELLS * MERGE
    cos, sin = tower.rotary_pos_emb(pixels, torch.stack((order // side, order % side), dim=-1))
    embed = tower.patch_embed.proj
    with torch.autocast("cpu", torch.bfloat16):
        hidden = linear(pixels, embed.weight.flatten(1), embed.bias) + tower.pos_embed(order)
        for block in tower.blocks:
            hidden = hidden + _attend(block.attn, block.norm1(hidden), cos, sin)
            hidden = hidden + block.mlp(block.norm2(hidden))
        features: torch.Tensor = tower.merger(hidden.flatten(0, 1))
    return features.view(number, CELLS**2, -1)


def _attend(
    attention: Qwen3_5VisionAttention, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> torch.Tensor:
    qkv = attention.qkv(hidden).view(*hidden.shape[:2], 3, attention.num_heads, -1)
    queries, keys, values = qkv.unbind(2)
    queries, keys = apply_rotary_pos_emb_vision(queries, keys, cos, sin)
    queries, keys, values = (each.transpose(1, 2) for each in (queries, keys, values))
    shares = (queries * attention.scaling @ keys.mT).softmax(-1)
    mixed: torch.Tensor = attention.proj((shares @ values).transpose(1, 2).flatten(2))
    return mixed
