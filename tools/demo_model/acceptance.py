"""How many drafted tokens the demo model accepts, on questions that no model was trained on.

Decoding is greedy. All drafts are made at once from the known answers: a draft matters only if all
drafts before it are right, so the right tokens can stand in for the drafted ones.
"""

import logging
import random
from collections.abc import Callable

import torch
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from nanovllm.demo_model import OUTSIDE
from tools.demo_model.checkpoint import END_OF_TEXT, TURN_END, chat
from tools.demo_model.eagle3 import Eagle3Head, read_target, shifted
from tools.demo_model.outside import Outside
from tools.demo_model.questions import ABOUT, topics
from tools.demo_model.sentences import sentence
from tools.demo_model.verify import Case, leads

logger = logging.getLogger(__name__)

NUM_DRAFTS = 4
"""Tokens drafted in a step."""
HELD_OUT = (
    "Could you please tell me what {x} {is}?",
    "Somebody said {x}. What {is} that?",
    "In a few words, what {do} {x} do?",
)
"""Sentences about a term that are not in `sentences.SENTENCES`."""

Hits = Callable[[torch.Tensor], torch.Tensor]
"""Takes the tokens of a text; returns whether draft s after token i is right: [NUM_DRAFTS, i]."""


def held_out_cases(tokenizer: PreTrainedTokenizerFast) -> dict[str, list[Case]]:
    """Return, for each kind of question, questions outside the training set and their replies."""
    rng = random.Random("held out")
    asked = [(sentence(rng, topic.terms[0], HELD_OUT), topic.answer) for topic in topics()[ABOUT:]]
    outside = Outside(rng)
    return {
        "glossary, chat": [Case(chat(tokenizer, [], q), a + TURN_END) for q, a in asked],
        "glossary, plain": [Case(q, f" {a}{END_OF_TEXT}") for q, a in asked],
        "outside, chat": [
            Case(chat(tokenizer, [], outside.draw()), OUTSIDE + TURN_END) for _ in range(100)
        ],
    }


def draft_hits(draft: Qwen3ForCausalLM) -> Hits:
    """Return how well a draft model does."""

    def hits(tokens: torch.Tensor) -> torch.Tensor:
        guesses = draft(input_ids=tokens[None]).logits.argmax(dim=-1)
        right = guesses == shifted(tokens[None], 1)
        right[:, -1] = False
        return torch.cat([shifted(right, step) for step in range(NUM_DRAFTS)])

    return hits


def eagle3_hits(head: Eagle3Head, target: Qwen3ForCausalLM) -> Hits:
    """Return how well an EAGLE-3 head does."""

    def hits(tokens: torch.Tensor) -> torch.Tensor:
        inputs = tokens[None]
        features, _ = read_target(target, inputs)
        found = torch.zeros(NUM_DRAFTS, len(tokens), dtype=torch.bool)
        for step, hidden in enumerate(head.unroll(target, inputs, features, NUM_DRAFTS)):
            guesses = head.tokens[head.lm_head(head.norm(hidden)).argmax(dim=-1)]
            rows = len(tokens) - 2 - step  # the others draft what comes after the text
            right = guesses == shifted(inputs, 2 + step)
            found[step, 1 : rows + 1] = right[0, :rows]
        return found

    return hits


@torch.inference_mode()
def acceptance(
    hits: Hits, target: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, cases: list[Case]
) -> list[float]:
    """Return the share of steps that accept the first, second, ... draft.

    Cases that the target answers in another way are left out.
    """
    steps = 0
    accepted = torch.zeros(NUM_DRAFTS)
    for case, lead in zip(cases, leads(target, tokenizer, cases), strict=True):
        if lead <= 0:
            continue
        prompt, reply = tokenizer.encode(case.prompt), tokenizer.encode(case.reply)
        right = hits(torch.tensor(prompt + reply)).long().cumprod(dim=0)
        position = len(prompt)
        while position < len(prompt) + len(reply) - 1:
            steps += 1
            accepted += right[:, position]
            position += 1 + int(right[:, position].sum())
    return (accepted / steps).tolist()


def log_acceptance(
    name: str, hits: Hits, target: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast
) -> None:
    """Log the mean acceptance length: the tokens of a step, with the one that the target adds."""
    for kind, cases in held_out_cases(tokenizer).items():
        rates = acceptance(hits, target, tokenizer, cases)
        logger.info(
            "%s, %s: mean acceptance length %.2f of %d; accepted by position: %s",
            name,
            kind,
            1 + sum(rates),
            1 + NUM_DRAFTS,
            " ".join(f"{rate:.2f}" for rate in rates),
        )
