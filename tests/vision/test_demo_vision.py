"""The model that ships with the package and sees: its answers, at every door, and their bits."""

import itertools
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from transformers import Qwen3_5ForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from nanovllm import LLM, SamplingParams, demo_model
from nanovllm.apps.cli import main as cli
from nanovllm.kernels.cpu.library import library
from tests.vision.conftest import FEW
from tests.vision.pictures import told
from tools.demo_model.scene_questions import BLIND, PHRASES, Question, Questions
from tools.demo_model.scenes import NEVER_TRAINED, Scene, draw, random_scene

GREEDY = SamplingParams(temperature=0, max_tokens=60)
OPTIONS: dict[str, Any] = {**FEW, "dtype": "bfloat16", "max_num_seqs": 16}


@pytest.fixture(scope="module")
def seeing() -> Iterator[LLM]:
    llm = LLM("demo-vision", **OPTIONS)
    yield llm
    llm.shutdown()


def asked(number: int, seed: int) -> list[tuple[Scene, Image.Image, Question]]:
    """Return questions of all kinds about pictures that nobody was trained on."""
    rng = random.Random(seed)
    questions = Questions(rng)
    scenes = [random_scene(rng, held_out=True) for _ in range(number)]
    kinds = itertools.cycle(PHRASES)
    return [(scene, draw(rng, scene), questions.ask(scene, next(kinds))) for scene in scenes]


def conversation(
    picture: Image.Image, question: str, *, asks_first: bool = False
) -> list[dict[str, Any]]:
    content = [{"type": "image", "image": picture}, {"type": "text", "text": question}]
    return [{"role": "user", "content": content[::-1] if asks_first else content}]


def test_answers_95_of_100_questions_about_new_pictures(seeing: LLM) -> None:
    """Also about kinds in colours that it never saw together, and before the picture comes."""
    given = asked(100, seed=20)
    conversations = [
        conversation(picture, question.text, asks_first=index % 2 == 1)
        for index, (_, picture, question) in enumerate(given)
    ]
    outputs = seeing.chat(conversations, GREEDY, use_tqdm=False)
    right = [output.text == q.answer for output, (*_, q) in zip(outputs, given, strict=True)]
    assert sum(right) >= 95
    new = [any(t in NEVER_TRAINED for t in scene if t) for scene, *_ in given]
    assert sum(new) >= 20
    assert sum(ok for ok, is_new in zip(right, new, strict=True) if is_new) >= 0.9 * sum(new)


@pytest.mark.skipif(library() is None, reason="no compiler here")
def test_bits_depend_on_nothing_else(seeing: LLM) -> None:
    """Alone, in a batch, in chunks that cut a picture, from the cache, and a second time."""
    given = [conversation(picture, question.text) for _, picture, question in asked(6, seed=21)]
    params = GREEDY.clone(logprobs=0)
    alone = LLM("demo-vision", **OPTIONS | {"max_num_seqs": 1, "enable_prefix_caching": False})
    expected = [told(alone.chat(each, params, use_tqdm=False)[0]) for each in given]
    alone.shutdown()
    chunks = LLM("demo-vision", **OPTIONS, max_num_batched_tokens=20)
    for llm in (seeing, seeing, chunks):
        assert [told(found) for found in llm.chat(given, params, use_tqdm=False)] == expected
    assert llm.chat(given[0], params, use_tqdm=False)[0].num_cached_tokens
    chunks.shutdown()


def test_transformers_answers_the_same() -> None:
    """In float32: token for token, from the same pixels."""
    processor = Qwen2VLImageProcessorPil.from_pretrained(demo_model.VISION_MODEL)
    model = Qwen3_5ForConditionalGeneration.from_pretrained(
        demo_model.VISION_MODEL, dtype=torch.float32
    )
    llm = LLM("demo-vision", **OPTIONS | {"dtype": "float32"})
    for _, picture, question in asked(5, seed=22):
        (output,) = llm.chat(conversation(picture, question.text), GREEDY, use_tqdm=False)
        found = processor([picture], return_tensors="pt")
        ids = torch.tensor([output.prompt_token_ids])
        kinds = (ids == model.config.image_token_id).long()
        theirs = model.generate(input_ids=ids, mm_token_type_ids=kinds, **found, max_new_tokens=60)
        assert theirs[0, ids.shape[1] :].tolist() == output.token_ids
    llm.shutdown()


def test_is_named_in_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (_, picture, question), *_ = asked(1, seed=20)
    picture.save(tmp_path / "a.png")
    flags = ["--image", str(tmp_path / "a.png"), "--temperature", "0", question.text]
    for command in (["run"], ["generate", "--chat"]):
        assert cli.main([*command, "demo-vision", *flags]) == 0
    assert capsys.readouterr().out.splitlines() == [question.answer] * 2


def test_says_that_it_sees_no_picture(seeing: LLM) -> None:
    (output,) = seeing.chat([{"role": "user", "content": "What do you see?"}], GREEDY)
    assert output.text == BLIND


def test_ships_within_3_mb() -> None:
    assert sum(f.stat().st_size for f in Path(demo_model.VISION_MODEL).iterdir()) < 3_000_000
