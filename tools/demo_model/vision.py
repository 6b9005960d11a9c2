"""Trains the demo model that sees: first its text model, then its eyes.

1. The text model learns to answer from symbols: a picture is a row for each cell, the sum of the
   vectors of four words: a kind, a colour, and where the cell is. They stay as they are.
2. The tower learns to turn each cell of a picture into that row. Then they understand each other.

A cell has the kind and the colour of its corner's thing, whether the thing covers the cell or not.
"""

import dataclasses
import logging
import random
from collections.abc import Callable
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerFast, Qwen3_5ForConditionalGeneration

from tools.demo_model.checkpoint import TURN_END, save_weights
from tools.demo_model.scene_questions import BLIND, Question, Questions
from tools.demo_model.scenes import COLOURS, KINDS, Scene, draw, random_scene
from tools.demo_model.train import IGNORED_LABEL, Schedule, optimize
from tools.demo_model.vision_model import (
    CELLS,
    PAD,
    PICTURE,
    SYSTEM,
    WIDTH,
    make_model,
    patches,
    see,
    write_files,
)

logger = logging.getLogger(__name__)

BATCH = 32
"""Pictures of a batch, each with a conversation."""


class Symbols:
    """The rows that stand for the cells of pictures, and are what the tower learns to say.

    They are sums of words' vectors, which are orthogonal.
    """

    def __init__(self) -> None:
        words = ["nothing", *KINDS, "none", *COLOURS, "top", "bottom", "left", "right"]
        generator = torch.Generator().manual_seed(0)
        square: torch.Tensor = torch.linalg.qr(torch.randn(WIDTH, WIDTH, generator=generator))[0]
        rows = square[: len(words)]
        self.words = dict(zip(words, rows, strict=True))
        ends = rows[-4:]
        self.kinds, self.colours = rows[: 1 + len(KINDS)], rows[1 + len(KINDS) : -4]
        self.corners: torch.Tensor = (ends[:2, None] + ends[None, 2:]).flatten(0, 1)
        places = torch.arange(CELLS) // (CELLS // 2)
        self.corner = (places[:, None] * 2 + places).flatten()
        self.kind_of = {kind: index + 1 for index, kind in enumerate(KINDS)}
        self.colour_of = {colour: index + 1 for index, colour in enumerate(COLOURS)}

    def classes(self, scenes: list[Scene]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the kinds and the colours of all cells, each [number of scenes, cells]."""
        kinds, colours = (
            torch.tensor([[of[getattr(t, a)] if t else 0 for t in scene] for scene in scenes])
            for of, a in ((self.kind_of, "kind"), (self.colour_of, "colour"))
        )
        return kinds[:, self.corner], colours[:, self.corner]

    def features(self, scenes: list[Scene]) -> torch.Tensor:
        """Return the rows of all cells: [number of scenes, cells, WIDTH]."""
        kinds, colours = self.classes(scenes)
        return self.kinds[kinds] + self.colours[colours] + self.corners[self.corner]

    def loss(self, features: torch.Tensor, scenes: list[Scene]) -> torch.Tensor:
        """Return how far features are from the rows, and from naming the right row."""
        kinds, colours = self.classes(scenes)
        distance = (features - self.features(scenes)).square().sum(-1).mean()
        naming = [
            cross_entropy((8 * features @ table.T).flatten(0, 1), classes.flatten())
            for table, classes in ((self.kinds, kinds), (self.colours, colours))
        ]
        return distance + naming[0] + naming[1]


@dataclasses.dataclass
class Batch:
    """Conversations about pictures.

    Args:
        scenes: what the pictures show.
        inputs: token ids, [number, length]; the soft tokens of row i are picture i's.
        labels: the next token where it is to be learned, else IGNORED_LABEL.
        positions: [3, number, length].
        asked: for each row, the questions with the places of their answers' labels.
    """

    scenes: list[Scene]
    inputs: torch.Tensor
    labels: torch.Tensor
    positions: torch.Tensor
    asked: list[list[tuple[Question, slice]]]


class Conversations:
    """Random conversations."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, seed: int, held_out: bool) -> None:
        self.tokenizer = tokenizer
        self.rng = random.Random(seed)
        self.questions = Questions(self.rng)
        self.held_out = held_out
        self.soft = tokenizer.convert_tokens_to_ids(PAD)

    def batch(self, turns: int | None = None) -> Batch:
        """Return a batch of conversations of so many turns, else of one to four."""
        turns = turns or self.rng.randint(1, 4)
        scenes = [random_scene(self.rng, self.held_out) for _ in range(BATCH)]
        rows, labels, asked = [], [], []
        for scene in scenes:
            ids, learned, said = self._conversation(scene, turns)
            rows.append(torch.tensor(ids))
            labels.append(torch.tensor(learned))
            asked.append(said)
        inputs = pad_sequence(rows, batch_first=True)
        return Batch(
            scenes,
            inputs[:, :-1],
            pad_sequence(labels, batch_first=True, padding_value=IGNORED_LABEL)[:, 1:],
            self.positions(inputs)[..., :-1],
            asked,
        )

    def positions(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return Qwen's three positions of rows that begin with the same tokens up to a picture."""
        number, length = inputs.shape
        found = torch.arange(length).expand(3, number, length).clone()
        for row in range(number):
            soft = (inputs[row] == self.soft).nonzero().flatten()
            if len(soft):
                start, end = int(soft[0]), int(soft[-1]) + 1
                grid = torch.arange(CELLS**2)
                found[0, row, start:end] = start
                found[1, row, start:end] = start + grid // CELLS
                found[2, row, start:end] = start + grid % CELLS
                found[:, row, end:] -= CELLS**2 - CELLS
        return found

    def _conversation(
        self, scene: Scene, turns: int
    ) -> tuple[list[int], list[int], list[tuple[Question, slice]]]:
        ids: list[int] = []
        labels: list[int] = []
        asked = []
        blind = not self.held_out and self.rng.random() < 0.03
        if not self.held_out and self.rng.random() < 0.15:
            self._say(ids, labels, f"<|im_start|>system\n{SYSTEM}<|im_end|>\n")
        for turn in range(turns):
            question = self.questions.ask(scene)
            shown = PICTURE.replace(PAD, PAD * CELLS**2) if turn == 0 and not blind else ""
            prompt = f"<|im_start|>user\n{shown}{question.text}<|im_end|>\n<|im_start|>assistant\n"
            self._say(ids, labels, prompt)
            start = len(ids) - 1
            answer = BLIND if blind else question.answer
            self._say(ids, labels, answer + TURN_END, learned=True)
            asked.append((question, slice(start, len(ids) - 1)))
            self._say(ids, labels, "\n")
        return ids, labels, asked

    def _say(self, ids: list[int], labels: list[int], text: str, learned: bool = False) -> None:
        tokens = self.tokenizer.encode(text)
        ids += tokens
        labels += tokens if learned else [IGNORED_LABEL] * len(tokens)


def answer_logits(
    model: Qwen3_5ForConditionalGeneration, batch: Batch, features: torch.Tensor
) -> torch.Tensor:
    """Return the logits at the places of labels, [number of labels, vocabulary]."""
    soft = batch.inputs == model.config.image_token_id
    text = model.model.language_model
    with torch.autocast("cpu", torch.bfloat16):
        embedded = text.embed_tokens(batch.inputs)
        shown = features[soft.any(1)].to(embedded.dtype)
        hidden = text(
            inputs_embeds=embedded.masked_scatter(soft[..., None], shown),
            position_ids=batch.positions,
            use_cache=False,
        ).last_hidden_state
        logits: torch.Tensor = model.lm_head(hidden[batch.labels != IGNORED_LABEL])
    return logits.float()


def answer_loss(
    model: Qwen3_5ForConditionalGeneration, batch: Batch, features: torch.Tensor
) -> torch.Tensor:
    """Return the mean loss of the answers' tokens."""
    labels = batch.labels[batch.labels != IGNORED_LABEL]
    return cross_entropy(answer_logits(model, batch, features), labels)


@torch.no_grad()
def evaluate(
    model: Qwen3_5ForConditionalGeneration,
    conversations: Conversations,
    features_of: Callable[[list[Scene]], torch.Tensor],
    batches: int = 8,
) -> dict[str, float]:
    """Return the share of questions that greedy decoding answers exactly, by what they ask."""
    right: dict[str, list[bool]] = {}
    for _ in range(batches):
        batch = conversations.batch(turns=1)
        logits = answer_logits(model, batch, features_of(batch.scenes))
        hit = torch.zeros_like(batch.labels, dtype=torch.bool)
        learned = batch.labels != IGNORED_LABEL
        hit[learned] = logits.argmax(-1) == batch.labels[learned]
        for row, asked in enumerate(batch.asked):
            for question, places in asked:
                right.setdefault(question.asks, []).append(bool(hit[row, places].all()))
    shares = {asks: sum(hits) / len(hits) for asks, hits in sorted(right.items())}
    shares["mean"] = sum(map(sum, right.values())) / sum(map(len, right.values()))
    return {asks: round(share, 3) for asks, share in shares.items()}


def train_vision(out: Path, schedule: Schedule, seed: int) -> None:
    """Train the text model and the tower for so many steps each; write the checkpoint to `out`."""
    tokenizer, config = write_files(out, seed)
    symbols = Symbols()
    model = make_model(tokenizer, config, symbols.words)
    conversations = Conversations(tokenizer, seed, held_out=False)
    unseen = Conversations(tokenizer, seed + 1, held_out=True)
    rng = conversations.rng

    def look(scenes: list[Scene]) -> torch.Tensor:
        return see(model, patches([draw(rng, scene) for scene in scenes]))

    def read_symbols() -> torch.Tensor:
        batch = conversations.batch()
        return answer_loss(model, batch, symbols.features(batch.scenes))

    def name_cells() -> torch.Tensor:
        scenes = [random_scene(rng, most_digits=4) for _ in range(BATCH)]
        return symbols.loss(look(scenes).float(), scenes)

    text, tower = model.model.language_model, model.model.visual
    optimize(text, text.layers, read_symbols, schedule)
    logger.info("right answers from symbols: %s", evaluate(model, unseen, symbols.features))
    optimize(tower, torch.nn.ModuleList((tower.blocks, tower.merger)), name_cells, schedule)
    logger.info("right answers from pictures: %s", evaluate(model, unseen, look))
    save_weights(model, out)
