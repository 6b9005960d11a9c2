"""Random models that read pictures, and what transformers makes of pictures and text with them."""

import dataclasses
import random
from collections.abc import Callable, Sequence as Seq
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import AutoModelForImageTextToText, PreTrainedConfig

from tests.checkpoints import random_model, write_json

NUM_WORDS = 100
SOFT = NUM_WORDS
"""The id of the soft token; those of the case's other tokens follow."""
NUM_NEW = 6

TEXT: dict[str, Any] = {
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
"""A small text model."""


@dataclasses.dataclass(frozen=True)
class Case:
    """A family.

    Args:
        config: transformers'.
        processor: preprocessor_config.json.
        soft: the soft token.
        placeholder: what templates write for a picture, with the soft token in it.
        tokens: that follow the soft token's id.
        read: returns the arguments of transformers' model for pictures, and the text in place of
            each soft token.
    """

    config: Callable[[], PreTrainedConfig]
    processor: dict[str, Any]
    soft: str
    placeholder: str
    tokens: tuple[str, ...]
    read: Callable[[Seq[Image.Image]], tuple[dict[str, Any], list[str]]]


@dataclasses.dataclass(frozen=True)
class Asked:
    """A prompt, and transformers' answer."""

    text: str
    pictures: list[Image.Image]
    prompt_ids: list[int]
    token_ids: list[int]
    logprobs: list[float]


def words(rng: random.Random, number: int) -> str:
    """Return some words."""
    return "".join(f" w{rng.randrange(NUM_WORDS)}" for _ in range(number))


def tokenizer_of(case: Case) -> Tokenizer:
    """Return a tokenizer whose words are w0 to w99, with the case's special tokens."""
    tokens = [*(f"w{index}" for index in range(NUM_WORDS)), case.soft, *case.tokens]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    special = [AddedToken(token, special=True, normalized=False) for token in tokens[NUM_WORDS:]]
    tokenizer.add_special_tokens(special)
    return tokenizer


def save(case: Case, path: Path) -> Any:
    """Save a random model of a case with its tokenizer, and return it."""
    model = random_model(case.config(), model_class=AutoModelForImageTextToText)
    model.save_pretrained(path)
    write_json(path / "preprocessor_config.json", case.processor)
    tokenizer_of(case).save(str(path / "tokenizer.json"))
    write_json(path / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast"})
    return model


def ask(case: Case, model: Any, parts: Seq[str | Image.Image]) -> Asked:
    """Ask transformers: a prompt of text and of pictures."""
    pictures = [part for part in parts if not isinstance(part, str)]
    inputs, texts = case.read(pictures) if pictures else ({}, [])
    of_pictures = iter(texts)
    text = "".join(part if isinstance(part, str) else case.placeholder for part in parts)
    between = text.split(case.soft)
    whole = between[0] + "".join(next(of_pictures) + part for part in between[1:])
    ids = tokenizer_of(case).encode(whole).ids
    with torch.no_grad():
        found = model.generate(
            input_ids=torch.tensor([ids]),
            attention_mask=torch.ones(1, len(ids), dtype=torch.long),
            max_new_tokens=NUM_NEW,
            do_sample=False,
            return_dict_in_generate=True,
            output_logits=True,
            **inputs,
            **_token_types(model, ids),
        )
    token_ids = found.sequences[0, len(ids) :].tolist()
    logprobs = [
        float(torch.log_softmax(logits[0].float(), -1)[token])
        for logits, token in zip(found.logits, token_ids, strict=True)
    ]
    return Asked(text, pictures, ids, token_ids, logprobs)


def _token_types(model: Any, ids: list[int]) -> dict[str, Any]:
    """Return what the Qwen models want besides: which tokens are a picture's."""
    if not model.config.model_type.startswith("qwen"):
        return {}
    return {"mm_token_type_ids": torch.tensor([[int(token == SOFT) for token in ids]])}
