"""Trains the demo model from scratch and overwrites the one in nanovllm/demo_model/model.

    python tools/train_demo_model.py
    python tools/train_demo_model.py --out /tmp/model --seed 1
    python tools/train_demo_model.py --help

1. Train a byte-level BPE tokenizer on nanovllm/demo_model/glossary.md.
2. Train a Qwen3 model of about one million parameters to reproduce the glossary's answers, in
   float32 on a CPU. The examples are random: plain "question answer" texts, and chats of mostly one
   to four turns, with and without a system message and an empty think block.
3. Round the weights to bfloat16, save the model and load it again.
4. Verify it: greedy decoding must give every answer exactly, and each token must lead by a margin.

The seed fixes the result for the same machine, thread count and library versions.
"""

import argparse
import json
import logging
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
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
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from nanovllm.demo_model import MODEL, entries

logger = logging.getLogger(__name__)

Entry = tuple[str, str]
Message = dict[str, str]

VOCAB_SIZE = 1024
IGNORED_LABEL = -100
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

# Relative frequency of texts by number of turns. The few long texts train the positions that long
# conversations use.
TURNS = {1: 5, 2: 2, 3: 2, 4: 2, 8: 1, 12: 1}

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


def train_tokenizer(glossary: list[Entry]) -> Tokenizer:
    """Return a byte-level BPE tokenizer, trained on the glossary, with Qwen's special tokens."""
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
    texts = [f"{question} {answer}" for question, answer in glossary]
    texts += [f"user\n{question}\n\nassistant\n{answer}" for question, answer in glossary]
    texts += [f"system\n{text}" for text in SYSTEM_PROMPTS]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(CONTROL_TOKENS) - len(THINK_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    added = [AddedToken(token, normalized=False, special=True) for token in CONTROL_TOKENS]
    added += [AddedToken(token, normalized=False, special=False) for token in THINK_TOKENS]
    tokenizer.add_tokens(added)
    if tokenizer.get_vocab_size() != VOCAB_SIZE:
        raise ValueError(
            f"the tokenizer has {tokenizer.get_vocab_size()} tokens, not {VOCAB_SIZE}: "
            "the glossary is too short"
        )
    return tokenizer


def write_tokenizer(out: Path, tokenizer: Tokenizer) -> None:
    """Write the tokenizer, its configuration and the chat template."""
    tokenizer.save(str(out / "tokenizer.json"))
    (out / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
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


def write_configs(out: Path, tokenizer: PreTrainedTokenizerFast) -> dict[str, Any]:
    """Write config.json and generation_config.json; return the content of config.json."""
    end_of_text, turn_end = tokenizer.encode(END_OF_TEXT + TURN_END)
    config = MODEL_CONFIG | {
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


class Examples:
    """Random training texts, drawn from the glossary."""

    def __init__(
        self, glossary: list[Entry], tokenizer: PreTrainedTokenizerFast, seed: int
    ) -> None:
        self.glossary = glossary
        self.tokenizer = tokenizer
        self.think = tokenizer.convert_tokens_to_ids(THINK_TOKENS[0])
        self.random = random.Random(seed)
        self.words = " ".join(answer for _, answer in glossary).split()

    def batch(self, size: int, turns: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the input ids and labels of texts with `turns` turns each, `size` turns in all."""
        texts = [self._text(turns) for _ in range(max(1, size // turns))]
        rows = [torch.tensor(self.tokenizer.encode(text)) for text in texts]
        labels = pad_sequence(rows, batch_first=True, padding_value=IGNORED_LABEL)
        inputs = labels.clamp(min=0)
        # The think block is part of the prompt. A model trained to generate <think> would generate
        # it in place of the answer when the prompt has no think block.
        return inputs, labels.masked_fill(labels == self.think, IGNORED_LABEL)

    def _text(self, turns: int) -> str:
        if turns == 1 and self.random.random() < 0.4:
            question, answer = self._entry()
            return f"{question} {answer}{END_OF_TEXT}"
        *history, (question, answer) = [self._entry() for _ in range(turns)]
        prompt = chat(
            self.tokenizer,
            history,
            question,
            system=self._system() if self.random.random() < 0.3 else None,
            thinking=self.random.random() < 0.7,
        )
        return f"{prompt}{answer}{TURN_END}\n"

    def _entry(self) -> Entry:
        question, answer = self.random.choice(self.glossary)
        if self.random.random() < 0.2:
            question = self.random.choice(
                [
                    question.lower(),
                    question.rstrip("?!."),
                    question.lower().rstrip("?!."),
                    question[0].lower() + question[1:],
                ]
            )
        return question, answer

    def _system(self) -> str:
        if self.random.random() < 0.5:
            return self.random.choice(SYSTEM_PROMPTS)
        return " ".join(self.random.choices(self.words, k=self.random.randint(3, 20)))


def learning_rate_factor(warmup: int, steps: int) -> Callable[[int], float]:
    """Return the schedule: linear warmup, then cosine decay to zero."""

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))

    return factor


def train(model: Qwen3ForCausalLM, examples: Examples, args: argparse.Namespace) -> None:
    """Train `model` in place with AdamW."""
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=args.learning_rate,
        betas=(0.9, 0.95),
        weight_decay=args.weight_decay,
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, learning_rate_factor(args.warmup, args.steps)
    )
    model.train()
    progress = tqdm(range(args.steps), desc="train", mininterval=2)
    for step in progress:
        turns = examples.random.choices(list(TURNS), weights=list(TURNS.values()))[0]
        inputs, labels = examples.batch(args.batch_size, turns)
        loss = model(input_ids=inputs, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 20 == 0:
            progress.set_postfix(turns=turns, loss=f"{loss.item():.4f}")


def save_weights(model: Qwen3ForCausalLM, out: Path) -> None:
    """Write the weights in bfloat16, without the head, which is tied to the embedding."""
    tensors = {
        name: tensor.to(torch.bfloat16).contiguous()
        for name, tensor in model.state_dict().items()
        if name != "lm_head.weight"
    }
    (out / "model.safetensors").write_bytes(save(tensors, metadata={"format": "pt"}))


def prompts_to_verify(
    glossary: list[Entry], tokenizer: PreTrainedTokenizerFast, seed: int
) -> dict[str, list[str]]:
    """Return a prompt for each entry, in the glossary's order, by the name of the format."""
    draw = random.Random(seed)
    questions = [question for question, _ in glossary]
    return {
        "raw": questions,
        "chat": [chat(tokenizer, [], q) for q in questions],
        "chat without thinking": [chat(tokenizer, [], q, thinking=False) for q in questions],
        "third turn": [chat(tokenizer, draw.sample(glossary, 2), q) for q in questions],
        "third turn, system, no thinking": [
            chat(
                tokenizer,
                draw.sample(glossary, 2),
                q,
                system=draw.choice(SYSTEM_PROMPTS),
                thinking=False,
            )
            for q in questions
        ],
        "fourth turn": [chat(tokenizer, draw.sample(glossary, 3), q) for q in questions],
        "tenth turn": [chat(tokenizer, draw.sample(glossary, 9), q) for q in questions],
    }


@torch.inference_mode()
def count_wrong(
    generate: Callable[..., torch.Tensor],
    tokenizer: PreTrainedTokenizerFast,
    prompts: list[str],
    expected: list[list[int]],
) -> int:
    """Return the number of prompts whose greedy continuation is not exactly the expected tokens."""
    batch = tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left")
    length = max(map(len, expected))
    output = generate(**batch, do_sample=False, max_new_tokens=length)
    generated = output[:, batch["input_ids"].shape[1] :].tolist()
    return sum(row[: len(want)] != want for row, want in zip(generated, expected, strict=True))


@torch.inference_mode()
def smallest_margin(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    prompts: list[str],
    expected: list[list[int]],
) -> float:
    """Return the smallest lead of an expected token's logit over the largest other logit."""
    smallest = math.inf
    for prompt, want in zip(prompts, expected, strict=True):
        context = tokenizer.encode(prompt)
        logits = model(input_ids=torch.tensor([context + want[:-1]])).logits
        logits = logits[0, len(context) - 1 :].float()
        target = torch.tensor(want)[:, None]
        lead = logits.gather(1, target)[:, 0] - logits.scatter(1, target, -math.inf).amax(dim=1)
        smallest = min(smallest, lead.min().item())
    return smallest


def verify(out: Path, glossary: list[Entry], seed: int, margin: float) -> None:
    """Check the saved model in float32 and bfloat16.

    Raises:
        RuntimeError: an answer is wrong, or the lead of one of its tokens is below `margin`.
    """
    tokenizer = AutoTokenizer.from_pretrained(out)
    if not isinstance(tokenizer, PreTrainedTokenizerFast) or tokenizer.eos_token != TURN_END:
        raise RuntimeError(f"the loaded tokenizer differs from the saved one: {tokenizer}")
    faults: list[str] = []
    for dtype in (torch.float32, torch.bfloat16):
        model = AutoModelForCausalLM.from_pretrained(out, dtype=dtype).eval()
        for name, prompts in prompts_to_verify(glossary, tokenizer, seed).items():
            endings = (
                f" {answer}{END_OF_TEXT}" if name == "raw" else f"{answer}{TURN_END}"
                for _, answer in glossary
            )
            expected = [tokenizer.encode(ending) for ending in endings]
            wrong = count_wrong(model.generate, tokenizer, prompts, expected)
            smallest = smallest_margin(model, tokenizer, prompts, expected)
            counts = f"{wrong} of {len(prompts)} wrong"
            report = f"{dtype}, {name}: {counts}, smallest margin {smallest:.2f}"
            logger.info(report)
            if wrong or smallest < margin:
                faults.append(report)
    if faults:
        raise RuntimeError("the model is not exact enough: " + "; ".join(faults))


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train the demo model on the glossary.")
    parser.add_argument("--out", type=Path, default=Path(MODEL), help="model directory to write")
    parser.add_argument("--steps", type=int, default=3500)
    parser.add_argument("--batch-size", type=int, default=32, help="question turns per step")
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--weight-decay", type=float, default=0.05)
    parser.add_argument("--warmup", type=int, default=100)
    parser.add_argument("--margin", type=float, default=3.0, help="smallest accepted logit lead")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    torch.manual_seed(args.seed)
    glossary = entries()
    args.out.mkdir(parents=True, exist_ok=True)
    write_tokenizer(args.out, train_tokenizer(glossary))
    tokenizer = PreTrainedTokenizerFast.from_pretrained(args.out)
    config = write_configs(args.out, tokenizer)
    model = Qwen3ForCausalLM(Qwen3Config(**config)).float()
    logger.info("%d entries, %d parameters", len(glossary), model.num_parameters())
    train(model, Examples(glossary, tokenizer, args.seed), args)
    save_weights(model, args.out)
    verify(args.out, glossary, args.seed, args.margin)


if __name__ == "__main__":
    main()
