"""Families of pictures beside transformers: text and pictures in float32, and bits in bfloat16."""

import random
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from nanovllm import LLM, SamplingParams
from nanovllm.outputs import RequestOutput
from tests.checkpoints import read_json, write_json
from tests.vision.asking import NUM_NEW, SOFT, Asked, Case, ask, save, tokenizer_of, words
from tests.vision.family_cases import CASES
from tests.vision.pictures import noise

GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_NEW, ignore_eos=True, logprobs=1)
TOLERANCE = 2e-4


class Seen:
    """A family's random model on disk, and prompts with transformers' answers."""

    def __init__(self, case: Case, path: Path) -> None:
        self.case = case
        self.path = str(path)
        model = save(case, path)
        rng = random.Random(0)
        first, second = noise(41, 33, 1), noise(17, 61, 2)
        self.asked = [
            ask(case, model, parts)
            for parts in (
                [first, words(rng, 9)],
                [words(rng, 5), first, words(rng, 4)],
                [words(rng, 7), second],
                [words(rng, 3), first, words(rng, 2), second, words(rng, 3)],
                [words(rng, 3), second, first, words(rng, 3)],
                [words(rng, 2), noise(1, 1, 3), words(rng, 2), noise(55, 1, 4), words(rng, 2)],
                [words(rng, 2), noise(77, 100, 5), words(rng, 2)],
                [words(rng, 20)],
            )
        ]


@pytest.fixture(scope="module", params=list(CASES))
def seen(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Seen:
    return Seen(CASES[request.param], tmp_path_factory.mktemp(request.param))


def start(seen: Seen, dtype: str, budget: int, **options: Any) -> LLM:
    """Return an engine for the model."""
    return LLM(
        seen.path,
        dtype=dtype,
        max_model_len=400,
        max_num_batched_tokens=budget,
        max_num_seqs=options.pop("max_num_seqs", 4),
        **options,
    )


def prompts(asked: Seq[Asked]) -> list[dict[str, Any]]:
    """Return prompts of text."""
    return [{"prompt": each.text, "multi_modal_data": {"image": each.pictures}} for each in asked]


def results(outputs: Seq[RequestOutput]) -> list[tuple[list[int], list[float]]]:
    """Return tokens and log-probabilities of each answer."""
    return [
        (
            list(output.outputs[0].token_ids),
            [next(iter(step.values())).logprob for step in output.outputs[0].logprobs],
        )
        for output in outputs
    ]


@pytest.mark.parametrize("budget", [400, 7])
def test_float32(seen: Seen, budget: int) -> None:
    """Tokens are transformers', in chunks that cut pictures, too, and with hits inside them."""
    llm = start(seen, "float32", budget)
    for turn in (0, 1):
        outputs = llm.generate(prompts(seen.asked), GREEDY, use_tqdm=False)
        for asked, output, (token_ids, logprobs) in zip(
            seen.asked, outputs, results(outputs), strict=True
        ):
            assert output.prompt_token_ids == asked.prompt_ids
            assert token_ids == asked.token_ids
            assert logprobs == pytest.approx(asked.logprobs, rel=TOLERANCE, abs=TOLERANCE)
            assert turn == 0 or len(asked.prompt_ids) < 17 or output.num_cached_tokens >= 16


def test_ids(seen: Seen) -> None:
    """A prompt of token ids has one soft token for a picture, or all of its tokens."""
    llm = start(seen, "float32", 400)
    for asked in seen.asked[3:6]:
        short = tokenizer_of(seen.case).encode(asked.text).ids
        assert short.count(SOFT) == len(asked.pictures)
        for token_ids in (short, asked.prompt_ids):
            prompt = {"prompt_token_ids": token_ids, "multi_modal_data": {"image": asked.pictures}}
            output = llm.generate([prompt], GREEDY, use_tqdm=False)[0]
            assert output.prompt_token_ids == asked.prompt_ids
            assert list(output.outputs[0].token_ids) == asked.token_ids


def test_bits(seen: Seen) -> None:
    """In bfloat16, too, an answer depends on nothing but its prompt."""
    alone = start(seen, "bfloat16", 400, enforce_eager=True, max_num_seqs=1)
    expected = results(alone.generate(prompts(seen.asked), GREEDY, use_tqdm=False))
    for options in ({"budget": 400}, {"budget": 11}, {"budget": 64, "num_kvcache_blocks": 12}):
        llm = start(seen, "bfloat16", **options)
        for _ in (0, 1):
            found = results(llm.generate(prompts(seen.asked), GREEDY, use_tqdm=False))
            assert found == expected


def test_experts_the_other_way_round(tmp_path: Path) -> None:
    """Published files of Qwen3-VL with experts have the inputs of their matrices first."""
    model = save(CASES["qwen3-moe"], tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    stacked = {name: tensor for name, tensor in tensors.items() if ".mlp.experts." in name}
    assert len(stacked) == 2 * model.config.text_config.num_hidden_layers
    turned = {name: tensor.transpose(1, 2).contiguous() for name, tensor in stacked.items()}

    def start_and_ask() -> tuple[LLM, Any]:
        llm = LLM(str(tmp_path), dtype="float32", max_model_len=64)
        return llm, results(llm.generate([list(range(30))], GREEDY, use_tqdm=False))

    llm, expected = start_and_ask()
    llm.update_weights([(name, 2 * tensor) for name, tensor in stacked.items()])
    assert results(llm.generate([list(range(30))], GREEDY, use_tqdm=False)) != expected
    llm.update_weights(list(turned.items()))
    assert results(llm.generate([list(range(30))], GREEDY, use_tqdm=False)) == expected
    save_file({**tensors, **turned}, file, {"format": "pt"})
    assert start_and_ask()[1] == expected


def test_published_config_of_qwen2_5(tmp_path: Path) -> None:
    """The published config.json has the text model's fields beside the tower's."""
    case = CASES["qwen2.5"]
    asked = ask(case, save(case, tmp_path), ["w1 w2", noise(41, 33), "w3"])
    config = read_json(tmp_path / "config.json")
    text = config.pop("text_config")
    rope = text.pop("rope_parameters")
    scaling = {"type": "mrope", "mrope_section": rope["mrope_section"]}
    kept = {key: value for key, value in text.items() if key not in ("layer_types", "model_type")}
    flat = {**kept, **config, "rope_theta": rope["rope_theta"], "rope_scaling": scaling}
    write_json(tmp_path / "config.json", flat)
    llm = LLM(str(tmp_path), dtype="float32", max_model_len=64)
    output = llm.generate(prompts([asked]), GREEDY, use_tqdm=False)[0]
    assert list(output.outputs[0].token_ids) == asked.token_ids
