"""The draft model and the EAGLE-3 head that ship with the demo model.

How tokens are drafted in training is compared with a plain sequence of drafts.
"""

import json
import random
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import Qwen3ForCausalLM

from nanovllm import SamplingParams, demo_model
from tools.demo_model.draft import drafted
from tools.demo_model.eagle3 import Eagle3Head, read_eagle3, read_target
from tools.demo_model.questions import ABOUT, topics
from tools.demo_model.sentences import SENTENCES, sentence

DRAFT, EAGLE3 = Path(demo_model.DRAFT_MODEL), Path(demo_model.EAGLE3)


def config(directory: str | Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((Path(directory) / "config.json").read_text())
    return found


@pytest.fixture(scope="module")
def target() -> Qwen3ForCausalLM:
    return Qwen3ForCausalLM.from_pretrained(demo_model.MODEL, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def head() -> Eagle3Head:
    return read_eagle3(EAGLE3)


def test_both_ship_within_1_mb() -> None:
    files = [*DRAFT.iterdir(), *EAGLE3.iterdir()]
    assert sum(file.stat().st_size for file in files) <= 1_000_000
    root = Path(__file__).parent.parent
    package = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]
    patterns = package["package-data"]["nanovllm"]
    shipped = [f for pattern in patterns for f in (root / "nanovllm").glob(pattern)]
    assert {f.resolve() for f in files} <= {f.resolve() for f in shipped}


def test_draft_model_has_the_vocabulary_of_the_model() -> None:
    model, draft = config(demo_model.MODEL), config(DRAFT)
    for name in ("vocab_size", "eos_token_id", "max_position_embeddings", "model_type"):
        assert draft[name] == model[name]
    assert {file.name for file in DRAFT.iterdir()} == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
    }, "the tokenizer is the model's"


def test_head_maps_its_tokens_to_those_of_the_model() -> None:
    """Other engines read t2d."""
    tensors = load_file(EAGLE3 / "model.safetensors")
    d2t, t2d = tensors["d2t"], tensors["t2d"]
    assert (d2t.dtype, t2d.dtype) == (torch.int64, torch.bool)
    assert (d2t + torch.arange(len(d2t))).tolist() == t2d.nonzero().flatten().tolist()


@torch.inference_mode()
def test_unrolled_steps_are_those_of_a_sequence_of_drafts(
    head: Eagle3Head, target: Qwen3ForCausalLM
) -> None:
    """Row 5 of every step, by one causal pass over the rows that a drafting engine would have."""
    row, steps = 5, 4
    inputs = torch.randint(0, 1000, (1, 16), generator=torch.Generator().manual_seed(0))
    features, _ = read_target(target, inputs)
    hidden = head.fc(features[:, : row + 1])
    for step, unrolled in enumerate(head.unroll(target, inputs, features, steps)):
        embedded = target.model.embed_tokens(inputs[:, 1 : row + 2 + step])
        output = head.midlayer(embedded, hidden, [])[:, -1]
        torch.testing.assert_close(unrolled[:, row], output)
        hidden = torch.cat((hidden, output[:, None]), dim=1)


def test_only_later_tokens_of_a_reply_are_drafted() -> None:
    labels = torch.tensor([[-100, 5, 6, 7, -100, -100, 8, 9]])
    assert drafted(labels).tolist() == [[False, True, True, False, False, False, True]]


HELD_OUT = (
    "Could you please tell me what {x} {is}?",
    "Somebody said {x}. What {is} that?",
    "In a few words, what {do} {x} do?",
)
"""Sentences about a term that the models have not seen in training."""


@pytest.mark.parametrize(
    ("model", "num_ranks"),
    [
        (demo_model.DRAFT_MODEL, 1),
        (demo_model.EAGLE3, 1),
        pytest.param(demo_model.EAGLE3, 2, marks=pytest.mark.long),
    ],
)
def test_drafts_are_accepted(make_llm: Any, model: str, num_ranks: int) -> None:
    spec = {"model": model, "num_speculative_tokens": 4}
    options = {"dtype": "float32", "max_model_len": 256, "tensor_parallel_size": num_ranks}
    llm = make_llm(demo_model.MODEL, speculative_config=spec, **options)
    drafting = llm.engine.scheduler.drafting
    drafting.controller.takes_all = True
    rng = random.Random("held out")
    asked = [sentence(rng, topic.terms[0], HELD_OUT) for topic in topics()[ABOUT::6]]
    chats = [[{"role": "user", "content": question}] for question in asked]
    llm.chat(chats, SamplingParams(temperature=0, max_tokens=100), use_tqdm=False)
    assert drafting.counts.mean_acceptance_length >= 4


def test_held_out_questions_are_not_in_training() -> None:
    assert not set(HELD_OUT) & set(SENTENCES)
