"""Text models inside models that also take pictures: their config and their tensors are nested."""

import random

import pytest
import transformers

from tests import checkpoints
from tests.models.test_decoder import assert_logits_agree

TEXT = {
    "vocab_size": 503,
    "hidden_size": 64,
    "intermediate_size": 77,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 4096,
    "eos_token_id": 1,
    "bos_token_id": 2,
    "pad_token_id": 0,
}
TOWER = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
SIGLIP = {**TOWER, "num_attention_heads": 2, "image_size": 28, "patch_size": 14}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "llama_4_scaling_beta": 0.1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
MROPE = {
    "rope_type": "default",
    "rope_theta": 10_000.0,
    "mrope_section": [4, 2, 2],
    "mrope_interleaved": True,
}
CASES = {
    "Gemma3": {
        "text_config": {"sliding_window": 9, "model_type": "gemma3_text"},
        "vision_config": {**SIGLIP, "model_type": "siglip_vision_model"},
        "mm_tokens_per_image": 4,
    },
    "Mistral3": {
        "text_config": {"model_type": "ministral3", "rope_parameters": YARN},
        "vision_config": {**SIGLIP, "model_type": "pixtral", "head_dim": 16},
        "tie_word_embeddings": False,
    },
    "Qwen3VL": {
        "text_config": {"rope_parameters": MROPE},
        "vision_config": {
            "depth": 1,
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_heads": 2,
            "out_hidden_size": 64,
            "deepstack_visual_indexes": [0],
        },
    },
    "MuseGlimmer": {
        "text_config": {"sliding_window": 21},
        "vision_config": {**TOWER, "num_attention_heads": 2},
    },
}


@pytest.mark.parametrize("family", CASES)
def test_logits_of_all_positions(family, tmp_path, monkeypatch, caplog):
    """What is for pictures is left out, with a line in the log."""
    fields = CASES[family]
    config_class = getattr(transformers, f"{family}Config")
    model_class = getattr(transformers, f"{family}ForConditionalGeneration")
    config = config_class(**{**fields, "text_config": {**TEXT, **fields["text_config"]}})
    config._attn_implementation = "eager"
    monkeypatch.setattr(checkpoints, "AutoModelForCausalLM", model_class)
    monkeypatch.setattr(
        model_class, "from_config", classmethod(lambda cls, c: cls(c)), raising=False
    )
    model = checkpoints.random_model(config, seed=random.Random(family).randrange(100))
    model.save_pretrained(tmp_path)
    model.config.vocab_size = TEXT["vocab_size"]
    with caplog.at_level("INFO", logger="nanovllm.checkpoint.loader"):
        assert_logits_agree(model, tmp_path, family)
