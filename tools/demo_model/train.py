"""The training texts of the demo model, and the training."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from tools.demo_model.checkpoint import END_OF_TEXT, SYSTEM_PROMPTS, TURN_END, chat
from tools.demo_model.questions import ABOUT, Questions

IGNORED_LABEL = -100
MARGIN = 2.0
"""Taken from the logit of the right token in training, so that it must lead by more."""


class Format(NamedTuple):
    """A shape of batches. Long conversations train the positions that they use."""

    weight: int
    """Relative frequency."""
    turns: int
    texts: int
    reply_tokens: int | None = None
    """Replies are cut to this length: their first tokens decide what they answer."""


FORMATS = (
    Format(9, turns=1, texts=64, reply_tokens=12),
    Format(6, turns=1, texts=32),
    Format(2, turns=2, texts=16),
    Format(2, turns=3, texts=10),
    Format(2, turns=4, texts=8),
    Format(1, turns=8, texts=4),
    Format(2, turns=12, texts=2),
)
BATCHES_PER_STEP = 2
"""A step averages the gradients of batches of different formats."""
POOL = 8
"""Batches of one format that are drawn at once and sorted by length, so that little is padding."""

Piece = tuple[str, bool]
"""A piece of a text, and whether the model must learn it: questions are only read."""
Rows = list[tuple[list[int], list[int]]]
"""The input ids and labels of texts."""


@dataclass(frozen=True)
class Schedule:
    """How long and how fast to train."""

    steps: int
    learning_rate: float
    matrix_learning_rate: float
    weight_decay: float
    warmup: int


class Examples:
    """Random training texts about the glossary and outside it."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, seed: int) -> None:
        self.tokenizer = tokenizer
        self.random = random.Random(seed)
        self.questions = Questions(self.random)
        self.words = " ".join(topic.answer for topic in self.questions.topics).split()
        self.pools: dict[Format, list[Rows]] = {form: [] for form in FORMATS}

    def batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the input ids and labels of texts of a random format, padded: [n, length]."""
        (form,) = self.random.choices(FORMATS, [form.weight for form in FORMATS])
        pool = self.pools[form]
        if not pool:
            number = POOL * form.texts
            rows = [self._row(self._text(form.turns), form.reply_tokens) for _ in range(number)]
            rows.sort(key=lambda row: len(row[0]))
            pool += [rows[start : start + form.texts] for start in range(0, number, form.texts)]
            self.random.shuffle(pool)
        inputs, labels = zip(*pool.pop(), strict=True)
        return (
            pad_sequence([torch.tensor(row) for row in inputs], batch_first=True),
            pad_sequence(
                [torch.tensor(row) for row in labels],
                batch_first=True,
                padding_value=IGNORED_LABEL,
            ),
        )

    def _row(self, pieces: list[Piece], reply_tokens: int | None) -> tuple[list[int], list[int]]:
        inputs: list[int] = []
        labels: list[int] = []
        for text, learned in pieces:
            tokens = self.tokenizer.encode(text)[: reply_tokens if learned else None]
            inputs += tokens
            labels += tokens if learned else [IGNORED_LABEL] * len(tokens)
        return inputs, labels

    def _text(self, turns: int) -> list[Piece]:
        if turns == 1 and self.random.random() < 0.45:
            return self._plain()
        system = self._system() if self.random.random() < 0.3 else None
        thinking = self.random.random() < 0.7
        pieces: list[Piece] = []
        history: list[tuple[str, str]] = []
        shown = ""
        for turn in range(turns):
            question, answer, _ = self.questions.draw()
            # Only the last turn may have the empty think block: the template drops it from others.
            prompt = chat(
                self.tokenizer,
                history,
                question,
                system=system,
                thinking=thinking or turn < turns - 1,
            )
            reply = f"{answer}{TURN_END}"
            pieces += [(prompt.removeprefix(shown), False), (reply, True)]
            shown = prompt + reply
            history.append((question, answer))
        return pieces

    def _plain(self) -> list[Piece]:
        kind = self.random.random()
        if kind < 0.1:
            words = self.random.choice(self.questions.topics).answer.split()
            cut = self.random.randint(5, 10)
            start, rest = " ".join(words[:cut]), " ".join(words[cut:])
        elif kind < 0.4:
            topic = self.random.choice(self.questions.topics[ABOUT:])
            start, _, rest = self.questions.beginning(topic)
        else:
            start, _, rest = self.questions.draw()
        return [(start, False), (f" {rest}{END_OF_TEXT}", True)]

    def _system(self) -> str:
        if self.random.random() < 0.5:
            return self.random.choice(SYSTEM_PROMPTS)
        return " ".join(self.random.choices(self.words, k=self.random.randint(3, 20)))


def learning_rate_factor(warmup: int, steps: int) -> Callable[[int], float]:
    """Return the schedule: linear warmup, constant, and linear decay in the last half."""

    def factor(step: int) -> float:
        return min(1.0, (step + 1) / warmup, 2 * (steps - step) / steps)

    return factor


def make_optimizers(
    matrices: Sequence[torch.nn.Parameter],
    others: Sequence[torch.nn.Parameter],
    schedule: Schedule,
) -> list[torch.optim.Optimizer]:
    """Return Muon for `matrices`, and AdamW for the rest."""
    return [
        torch.optim.Muon(
            matrices, lr=schedule.matrix_learning_rate, weight_decay=schedule.weight_decay
        ),
        torch.optim.AdamW(
            others,
            lr=schedule.learning_rate,
            betas=(0.9, 0.95),
            weight_decay=schedule.weight_decay,
        ),
    ]


def train(model: Qwen3ForCausalLM, examples: Examples, schedule: Schedule) -> None:
    """Train `model` in place."""
    optimize(model, model.model.layers, lambda: mean_loss(model, *examples.batch()), schedule)


def optimize(
    model: torch.nn.Module,
    layers: torch.nn.Module,
    batch_loss: Callable[[], torch.Tensor],
    schedule: Schedule,
) -> None:
    """Minimise `batch_loss`.

    Args:
        model: Trained in place.
        layers: The part of `model` whose weight matrices Muon trains.
        batch_loss: Returns the mean loss of `model` on the next batch.
        schedule: How long and how fast.
    """
    matrices = [p for p in layers.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if not any(p is matrix for matrix in matrices)]
    optimizers = make_optimizers(matrices, others, schedule)
    factor = learning_rate_factor(schedule.warmup, schedule.steps)
    rates = [torch.optim.lr_scheduler.LambdaLR(optimizer, factor) for optimizer in optimizers]
    model.train()
    progress = tqdm(range(schedule.steps), desc="train", mininterval=2)
    for step in progress:
        losses = []
        for _ in range(BATCHES_PER_STEP):
            losses.append(batch_loss())
            torch.autograd.backward(losses[-1] / BATCHES_PER_STEP)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, rate in zip(optimizers, rates, strict=True):
            optimizer.step()
            optimizer.zero_grad()
            rate.step()
        if step % 20 == 0:
            progress.set_postfix(loss=" ".join(f"{loss.item():.4f}" for loss in losses))


def mean_loss(model: Qwen3ForCausalLM, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the mean loss of the labels that are to be learned, with `MARGIN`."""
    hidden = model.model(input_ids=inputs[:, :-1]).last_hidden_state
    learned = labels[:, 1:] != IGNORED_LABEL
    targets = labels[:, 1:][learned]
    logits = model.lm_head(hidden[learned])
    logits[torch.arange(len(targets)), targets] -= MARGIN
    return cross_entropy(logits, targets)
