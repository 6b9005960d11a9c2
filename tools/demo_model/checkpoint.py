"""The demo model's checkpoint: its tokenizer, its chat template and its configuration."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, save
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import PreTrainedModel, PreTrainedTokenizerFast, Qwen3ForCausalLM

Entry = tuple[str, str]
Message = dict[str, str]

VOCAB_SIZE = 1024
END_OF_TEXT = "<|endoftext|>"
TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"
CONTROL_TOKENS = (END_OF_TEXT, TURN_START, TURN_END)
# As in Qwen3, the think tags are single tokens, and skip_special_tokens does not remove them.
THINK_TOKENS = ("<think>", "</think>")

QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)

CHAT_TEMPLATE = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""

SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are a helpful, respectful and honest assistant.",
    "You are Qwen, created by Alibaba Cloud. You are a helpful assistant.",
    "You are an expert in LLM inference.",
    "Answer briefly.",
    "Be concise and precise.",
    "Explain terms of LLM inference in one or two sentences.",
    "Answer every question from the glossary.",
)

MODEL_CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 384,
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "initializer_range": 0.02,
    "sliding_window": None,
    "max_window_layers": 4,
    "use_sliding_window": False,
    "tie_word_embeddings": True,
    "use_cache": True,
    "dtype": "bfloat16",
}


def write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def glossary_texts(glossary: list[Entry]) -> list[str]:
    """Return what the text model's tokenizer learns."""
    texts = [f"{question} {answer}" for question, answer in glossary]
    texts += [f"user\n{question}\n\nassistant\n{answer}" for question, answer in glossary]
    return texts + [f"system\n{text}" for text in SYSTEM_PROMPTS]


def train_tokenizer(
    texts: list[str], size: int = VOCAB_SIZE, control: tuple[str, ...] = CONTROL_TOKENS
) -> Tokenizer:
    """Return a byte-level BPE tokenizer of `size` tokens, with Qwen's special tokens."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=False))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False),
        ]
    )
    tokenizer.post_processor = processors.ByteLevel(
        add_prefix_space=False, trim_offsets=False, use_regex=False
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size - len(control) - len(THINK_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    added = [AddedToken(token, normalized=False, special=True) for token in control]
    added += [AddedToken(token, normalized=False, special=False) for token in THINK_TOKENS]
    tokenizer.add_tokens(added)
    if tokenizer.get_vocab_size() != size:
        raise ValueError(
            f"the tokenizer has {tokenizer.get_vocab_size()} tokens, not {size}: "
            "the texts are too short"
        )
    return tokenizer


def write_tokenizer(out: Path, tokenizer: Tokenizer, template: str = CHAT_TEMPLATE) -> None:
    """Write the tokenizer, its configuration and the chat template."""
    tokenizer.save(str(out / "tokenizer.json"))
    (out / "chat_template.jinja").write_text(template, encoding="utf-8")
    write_json(
        out / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": TURN_END,
            "pad_token": END_OF_TEXT,
            "additional_special_tokens": [TURN_START],
            "model_max_length": MODEL_CONFIG["max_position_embeddings"],
            "clean_up_tokenization_spaces": False,
            "add_prefix_space": False,
        },
    )


def write_configs(
    out: Path, tokenizer: PreTrainedTokenizerFast, architecture: dict[str, Any]
) -> dict[str, Any]:
    """Write config.json and generation_config.json; return the content of config.json."""
    end_of_text, turn_end = tokenizer.encode(END_OF_TEXT + TURN_END)
    config = architecture | {
        "bos_token_id": end_of_text,
        "eos_token_id": turn_end,
        "pad_token_id": end_of_text,
    }
    write_json(out / "config.json", config)
    write_json(
        out / "generation_config.json",
        {
            "bos_token_id": end_of_text,
            "eos_token_id": [turn_end, end_of_text],
            "pad_token_id": end_of_text,
            "do_sample": False,
        },
    )
    return config


def chat(
    tokenizer: PreTrainedTokenizerFast,
    history: list[Entry],
    question: str,
    *,
    system: str | None = None,
    thinking: bool = True,
) -> str:
    """Return the chat prompt that asks `question` after the turns of `history`."""
    messages: list[Message] = [{"role": "system", "content": system}] if system else []
    for earlier_question, answer in history:
        messages.append({"role": "user", "content": earlier_question})
        messages.append({"role": "assistant", "content": answer})
    messages.append({"role": "user", "content": question})
    prompt = tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True, enable_thinking=thinking
    )
    return str(prompt)


def save_weights(model: PreTrainedModel, out: Path) -> None:
    """Write the weights in bfloat16, without the head, which is tied to the embedding."""
    tensors = {
        name: tensor.to(torch.bfloat16).contiguous()
        for name, tensor in model.state_dict().items()
        if name != "lm_head.weight"
    }
    (out / "model.safetensors").write_bytes(save(tensors, metadata={"format": "pt"}))


def read_weights(model: Qwen3ForCausalLM, path: Path) -> None:
    """Set the weights of `model` to those that `save_weights` wrote."""
    tensors = load((path / "model.safetensors").read_bytes())
    model.load_state_dict({**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"]})
