"""Trains a demo model, its draft model or its EAGLE-3 head, and overwrites the shipped one.

    python -m tools.demo_model
    python -m tools.demo_model --out /tmp/model --seed 1
    python -m tools.demo_model --start nanovllm/demo_model/model --steps 700
    python -m tools.demo_model --part draft
    python -m tools.demo_model --part eagle3
    python -m tools.demo_model --part vision
    python -m tools.demo_model --help

The model:

1. Train a byte-level BPE tokenizer on nanovllm/demo_model/glossary.md.
2. Train a Qwen3 model of about one million parameters to answer questions with the glossary's
   answers, in float32 on a CPU. The examples are random: the glossary's own questions, other ways
   to ask for its entries, and questions outside it; as plain texts, and in chats of mostly one to
   four turns, with and without a system message and an empty think block.
3. Round the weights to bfloat16, save the model and load it again.
4. tests/test_demo_model.py verifies it: greedy decoding must give every answer exactly.

`--start` is for small changes of the glossary or of the questions: the model keeps what it knows,
and most of the time is saved.

The draft model and the EAGLE-3 head learn from the shipped model, on the same examples. Retrain
both after the model; tests/test_demo_drafts.py has the mean acceptance length that they must reach.

The model that sees is another one, which knows shapes and digits: vision.py says how it learns, and
tests/vision/test_demo_vision.py what it must answer.

The seed fixes the result for the same machine, thread count and library versions.
"""

import argparse
import logging
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from nanovllm.demo_model import DRAFT_MODEL, EAGLE3, MODEL, VISION_MODEL, entries
from tools.demo_model.checkpoint import (
    MODEL_CONFIG,
    glossary_texts,
    read_weights,
    save_weights,
    train_tokenizer,
    write_configs,
    write_tokenizer,
)
from tools.demo_model.draft import train_draft
from tools.demo_model.eagle3 import train_eagle3
from tools.demo_model.train import Examples, Schedule, train
from tools.demo_model.vision import train_vision

logger = logging.getLogger(__name__)

OUT = {"model": MODEL, "draft": DRAFT_MODEL, "eagle3": EAGLE3, "vision": VISION_MODEL}
STEPS = {"model": 2500, "draft": 1200, "eagle3": 500, "vision": 1600}


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train the demo model on the glossary.")
    parser.add_argument("--part", choices=list(OUT), default="model", help="what to train")
    parser.add_argument("--out", type=Path, help="directory to write; default: the shipped one")
    parser.add_argument(
        "--start", type=Path, help="model directory whose weights to begin with, not random ones"
    )
    parser.add_argument("--steps", type=int, help=f"default: {STEPS}")
    parser.add_argument("--learning-rate", type=float, default=3e-3, help="of embeddings and norms")
    parser.add_argument("--matrix-learning-rate", type=float, default=0.02, help="of the rest")
    parser.add_argument("--weight-decay", type=float, default=0.05)
    parser.add_argument("--warmup", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    torch.manual_seed(args.seed)
    out = args.out or Path(OUT[args.part])
    out.mkdir(parents=True, exist_ok=True)
    schedule = Schedule(
        args.steps or STEPS[args.part],
        args.learning_rate,
        args.matrix_learning_rate,
        args.weight_decay,
        args.warmup,
    )
    if args.part == "model":
        train_model(args, out, schedule)
    elif args.part == "vision":
        train_vision(out, schedule, args.seed)
    else:
        train_proposer(args, out, schedule)


def train_model(args: argparse.Namespace, out: Path, schedule: Schedule) -> None:
    glossary = entries()
    write_tokenizer(out, train_tokenizer(glossary_texts(glossary)))
    tokenizer = PreTrainedTokenizerFast.from_pretrained(out)
    config = write_configs(out, tokenizer, MODEL_CONFIG)
    model = Qwen3ForCausalLM(Qwen3Config(**config)).float()
    if args.start is not None:
        read_weights(model, args.start)
    logger.info("%d entries, %d parameters", len(glossary), model.num_parameters())
    train(model, Examples(tokenizer, args.seed), schedule)
    save_weights(model, out)


def train_proposer(args: argparse.Namespace, out: Path, schedule: Schedule) -> None:
    """Train the draft model or the EAGLE-3 head of the shipped model."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(MODEL)
    target = Qwen3ForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    examples = Examples(tokenizer, args.seed)
    train_part = train_draft if args.part == "draft" else train_eagle3
    train_part(target, examples, schedule, out)


if __name__ == "__main__":
    main()
