"""Checks the saved model: greedy decoding must answer exactly, and by a margin."""

import logging
import math
import random
from pathlib import Path
from typing import NamedTuple

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedTokenizerFast,
    Qwen3ForCausalLM,
)

from nanovllm.demo_model import OUTSIDE
from tools.demo_model.checkpoint import END_OF_TEXT, SYSTEM_PROMPTS, TURN_END, Entry, chat
from tools.demo_model.questions import Questions

logger = logging.getLogger(__name__)

BATCH = 64
"""Texts in one pass."""


class Case(NamedTuple):
    prompt: str
    reply: str
    """Including the token that ends it."""


def exact_cases(glossary: list[Entry], tokenizer: PreTrainedTokenizerFast) -> dict[str, list[Case]]:
    """Return a case for each entry, in the glossary's own words, by the name of the format."""
    draw = random.Random(0)

    def chats(turns: int, system: bool = False, thinking: bool = True) -> list[Case]:
        return [
            Case(
                chat(
                    tokenizer,
                    draw.sample(glossary, turns - 1),
                    question,
                    system=draw.choice(SYSTEM_PROMPTS) if system else None,
                    thinking=thinking,
                ),
                answer + TURN_END,
            )
            for question, answer in glossary
        ]

    return {
        "plain": [Case(question, f" {answer}{END_OF_TEXT}") for question, answer in glossary],
        "chat": chats(1),
        "chat without thinking": chats(1, thinking=False),
        "third turn": chats(3),
        "third turn, system, no thinking": chats(3, system=True, thinking=False),
        "fourth turn": chats(4),
        "tenth turn": chats(10),
    }


def other_cases(tokenizer: PreTrainedTokenizerFast) -> dict[str, list[Case]]:
    """Return random cases: other ways to ask for the entries, and questions outside of them."""
    questions = Questions(random.Random(1))
    variants = [questions.variant(topic) for topic in questions.topics for _ in range(5)]
    outside = [questions.outside.draw() for _ in range(500)]
    return {
        "variants, chat": [Case(chat(tokenizer, [], q), a + TURN_END) for q, a, _ in variants],
        "variants, plain": [Case(q, f" {text}{END_OF_TEXT}") for q, _, text in variants],
        "outside, chat": [Case(chat(tokenizer, [], q), OUTSIDE + TURN_END) for q in outside],
        "outside, plain": [Case(q, f" {OUTSIDE}{END_OF_TEXT}") for q in outside],
    }


@torch.inference_mode()
def leads(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, cases: list[Case]
) -> list[float]:
    """Return the smallest lead of each reply's tokens over the largest other logit.

    Greedy decoding gives the reply if and only if its lead is above zero.
    """
    found = []
    for start in range(0, len(cases), BATCH):
        part = cases[start : start + BATCH]
        prompts = [tokenizer.encode(case.prompt) for case in part]
        replies = [tokenizer.encode(case.reply) for case in part]
        rows = [torch.tensor(a + b) for a, b in zip(prompts, replies, strict=True)]
        logits = model(input_ids=pad_sequence(rows, batch_first=True)).logits.float()
        for row, prompt, reply in zip(logits, prompts, replies, strict=True):
            scores = row[len(prompt) - 1 : len(prompt) + len(reply) - 1]
            target = torch.tensor(reply)[:, None]
            others = scores.scatter(1, target, -math.inf).amax(dim=1)
            found.append((scores.gather(1, target)[:, 0] - others).min().item())
    return found


def verify(out: Path, glossary: list[Entry], margin: float, most_wrong: float) -> None:
    """Check the saved model in float32 and bfloat16.

    Raises:
        RuntimeError: to one of the glossary's own questions, an answer's lead is below `margin`;
            or more than `most_wrong` of the other questions of a format are answered wrongly.
    """
    tokenizer = AutoTokenizer.from_pretrained(out)
    if not isinstance(tokenizer, PreTrainedTokenizerFast) or tokenizer.eos_token != TURN_END:
        raise RuntimeError(f"the loaded tokenizer differs from the saved one: {tokenizer}")
    exact, other = exact_cases(glossary, tokenizer), other_cases(tokenizer)
    faults: list[str] = []
    for dtype in (torch.float32, torch.bfloat16):
        model = AutoModelForCausalLM.from_pretrained(out, dtype=dtype).eval()
        for name, cases in (exact | other).items():
            found = leads(model, tokenizer, cases)
            wrong = [case.prompt for case, lead in zip(cases, found, strict=True) if lead <= 0]
            report = (
                f"{dtype}, {name}: {len(wrong)} of {len(cases)} wrong, "
                f"smallest margin {min(found):.2f}"
            )
            logger.info("%s %s", report, wrong[:5])
            if min(found) < margin if name in exact else len(wrong) > most_wrong * len(cases):
                faults.append(report)
    if faults:
        raise RuntimeError("the model is not exact enough: " + "; ".join(faults))
