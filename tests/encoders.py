"""Makes checkpoints of small encoders, with a tokenizer, in the form of sentence-transformers."""

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification, PreTrainedModel

from nanovllm import demo_model
from tests.checkpoints import random_model, write_json

SPECIAL = ["[UNK]", "[PAD]", "[CLS]", "[SEP]", "[MASK]"]
SIZES: dict[str, Any] = {
    "vocab_size": 500,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "dtype": "float32",
    "pad_token_id": 1,
}
MODULES = {"": "Transformer", "1_Pooling": "Pooling", "2_Normalize": "Normalize"}


def wordpiece() -> Tokenizer:
    """Return BERT's tokenizer, trained on the demo model's glossary."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(
        vocab_size=SIZES["vocab_size"], special_tokens=SPECIAL, show_progress=False
    )
    tokenizer.train_from_iterator((text for pair in demo_model.entries() for text in pair), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    return tokenizer


def make_encoder(
    path: Path, model_type: str = "bert", *, pooling: str | None = "mean", **config: Any
) -> PreTrainedModel:
    """Save a random encoder of 128 positions, and return it; with `num_labels`, a cross-encoder.

    Args:
        pooling: by sentence-transformers' name; None: without its files.
    """
    first = 0 if model_type == "bert" else 2
    fields = {**SIZES, "max_position_embeddings": 128 + first, **config}
    kind = AutoModelForSequenceClassification if "num_labels" in config else AutoModel
    model = random_model(AutoConfig.for_model(model_type, **fields), model_class=kind)
    model.save_pretrained(path)
    wordpiece().save(str(path / "tokenizer.json"))
    named: dict[str, Any] = {"cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[PAD]"}
    if first:  # RoBERTa's tokenizers give no types of tokens
        named["model_input_names"] = ["input_ids", "attention_mask"]
    write_json(path / "tokenizer_config.json", {"tokenizer_class": "BertTokenizer", **named})
    if pooling is not None:
        listed = [
            {"name": kind, "type": f"sentence_transformers.models.{kind}", "path": folder}
            for folder, kind in MODULES.items()
        ]
        (path / "modules.json").write_text(json.dumps(listed))
        (path / "1_Pooling").mkdir(exist_ok=True)
        sizes = {"embedding_dimension": SIZES["hidden_size"]}
        write_json(path / "1_Pooling/config.json", {**sizes, "pooling_mode": pooling})
    return model
