"""Qwen3-VL and Qwen3.5: pixels, tokens and bits."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from nanovllm import LLM
from nanovllm.features.vision import pixels
from nanovllm.features.vision.qwen import QwenVL
from nanovllm.kernels.cpu.library import library
from tests.vision.pictures import PARAMS, noise, told
from tests.vision.qwen import PAD, PICTURE, PROCESSOR, by_transformers, make_model, processed

TEXT = "What is paged attention?"
PROMPTS: dict[str, tuple[str, list[tuple[int, int]]]] = {
    "first": (f"{PICTURE}{TEXT}", [(30, 50)]),
    "middle": (f"{TEXT}\n{PICTURE}\n{TEXT}", [(61, 17)]),
    "last": (f"{TEXT}{PICTURE}", [(8, 8)]),
    "two": (f"{TEXT}{PICTURE} and {PICTURE}{TEXT}", [(40, 40), (23, 77)]),
    "adjacent": (f"{PICTURE}{PICTURE}{TEXT}", [(30, 50), (30, 50)]),
    "one pixel": (f"{PICTURE}{TEXT}", [(1, 1)]),
    "long": (f"{TEXT}{PICTURE}{TEXT}", [(2, 398)]),
}


def prompt(name: str) -> dict[str, Any]:
    text, sizes = PROMPTS[name]
    pictures = [noise(*size, seed) for seed, size in enumerate(sizes)]
    return {"prompt": text, "multi_modal_data": {"image": pictures}}


@pytest.mark.parametrize("kind", ["qwen3_vl", "qwen3_5"])
def test_answers_are_those_of_transformers(
    qwen: Callable[[str], Path], make_llm: Callable[..., LLM], kind: str
) -> None:
    """Whole and in chunks that cut pictures; the second time with hits inside of them."""
    path = qwen(kind)
    whole = make_llm(path, dtype="float32")
    cut = make_llm(path, dtype="float32", max_num_batched_tokens=19)
    theirs = type(make_model(kind, _ids(whole))).from_pretrained(path).float().eval()
    given = [prompt(name) for name in PROMPTS]
    first, second, third = (
        llm.generate(given, PARAMS, use_tqdm=False) for llm in (whole, whole, cut)
    )
    assert sum(output.num_cached_tokens for output in second) >= 96
    grown = prompt("first")  # a later turn brings another picture
    grown["prompt"] += f" {TEXT}{PICTURE}"
    grown["multi_modal_data"]["image"].append(noise(24, 8))
    assert whole.generate(grown, PARAMS, use_tqdm=False)[0].num_cached_tokens >= 32
    for name, *outputs in zip(PROMPTS, first, second, third, strict=True):
        pictures = prompt(name)["multi_modal_data"]["image"]
        tokens, total, _ = by_transformers(theirs, outputs[0].prompt_token_ids, pictures)
        for output in outputs:
            found, found_total = told(output)
            assert found == tokens, name
            assert found_total == pytest.approx(total, rel=2e-4, abs=2e-4), name


def _ids(llm: LLM) -> dict[str, int]:
    tokenizer = llm.engine.input_processor.tokenizer
    assert tokenizer is not None
    return tokenizer.get_vocab()


@pytest.mark.skipif(library() is None, reason="no compiler here")
@pytest.mark.parametrize("kind", ["qwen3_vl", "qwen3_5"])
def test_bits_do_not_depend_on_how_a_prompt_is_computed(
    qwen: Callable[[str], Path], make_llm: Callable[..., LLM], kind: str
) -> None:
    path = qwen(kind)
    given = [prompt(name) for name in ("middle", "two", "first")]
    alone = make_llm(path, dtype="bfloat16", enforce_eager=True)
    expected = [told(alone.generate(each, PARAMS, use_tqdm=False)[0]) for each in given]
    texts: list[Any] = [TEXT * 3, *given, TEXT]
    told_text = [told(alone.generate(each, PARAMS, use_tqdm=False)[0]) for each in texts[::4]]
    for options in (
        {},
        {"max_num_batched_tokens": 7},
        {"max_num_batched_tokens": 40, "num_kvcache_blocks": 14},
        {"speculative_config": {"method": "ngram"}},
    ):
        llm = make_llm(path, dtype="bfloat16", **options)
        for _ in range(2):
            outputs = llm.generate(texts, PARAMS, use_tqdm=False)
            assert [told(output) for output in outputs[1:4]] == expected, options
            assert [told(output) for output in outputs[::4]] == told_text, options
    several = llm.generate(given, PARAMS.clone(n=2), use_tqdm=False)
    for output, (tokens, _) in zip(several, expected, strict=True):
        assert [completion.token_ids for completion in output.outputs] == [tokens] * 2


def test_pixels_are_those_of_transformers() -> None:
    """Of 200 sizes, 1 x 1 and 1 : 199 among them."""
    random.seed(0)
    family = QwenVL({"vision_config": {"patch_size": 4}, "text_config": {}}, PROCESSOR)
    sizes = [(1, 1), (1, 199), (199, 1), (2000, 10), (8, 8)]
    sizes += [(random.randint(1, 120), random.randint(1, 120)) for _ in range(195)]
    for width, height in sizes:
        if max(width, height) > 200 * min(width, height):
            continue
        picture = noise(height, width, width + height)
        (view,) = (layout := family.layout(width, height, {})).views
        (rgb,) = pixels.resized(picture, layout.views, family.resample)
        ours = family.normalized(torch.frombuffer(bytearray(rgb), dtype=torch.uint8), view.size)
        theirs = processed([picture])
        grid = theirs["image_grid_thw"][0].tolist()
        assert grid == [1, view.height // 4, view.width // 4]
        torch.testing.assert_close(family.patches(ours), theirs["pixel_values"], rtol=0, atol=2e-7)


def test_a_second_question_about_a_picture_encodes_nothing(llm: LLM) -> None:
    hook = llm.engine.scheduler.hooks[-1]
    before = hook.num_encoded  # type: ignore[attr-defined]
    picture = noise(33, 44, 7)
    for text in ("What?", "Where is it, and why?", f"{TEXT} {TEXT}"):
        given = {"prompt": f"{text}{PICTURE}{text}", "multi_modal_data": {"image": picture}}
        llm.generate([given, given], PARAMS, use_tqdm=False)
    assert hook.num_encoded == before + 1  # type: ignore[attr-defined]


def test_soft_tokens_of_text_stay_text(llm: LLM) -> None:
    """A user who writes the marker takes nobody's picture."""
    content = [
        {"type": "text", "text": f"Is {PAD} or {PICTURE} a word?"},
        {"type": "image", "image": noise(16, 24)},
        {"type": "text", "text": f"{PAD}?"},
    ]
    output = llm.chat([{"role": "user", "content": content}], PARAMS, use_tqdm=False)[0]
    (pad,) = llm.engine.input_processor.encode(PAD, rendered=True)
    assert output.prompt_token_ids.count(pad) == 3 + 6
    plain = llm.chat([{"role": "user", "content": f"Is {PAD} a word?"}], PARAMS, use_tqdm=False)[0]
    assert plain.prompt_token_ids.count(pad) == 1
    call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    history = [
        {"role": "user", "content": f"{PAD}?"},
        {"role": "assistant", "content": f"{PICTURE}!", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": f"{PAD} {PAD}"},
    ]
    ids = llm.render([*history, {"role": "user", "content": content}])
    assert ids.count(pad) == 4 + 3 + 6
    last = llm.engine.input_processor.tokenizer.decode(ids, skip_special_tokens=False)  # type: ignore[union-attr]
    shown = f"Is {PAD} or {PICTURE} a word?<|vision_start|>{PAD * 6}<|vision_end|>{PAD}?<|im_end|>"
    assert shown in last  # each at its place


def test_only_equal_pictures_share_blocks(llm: LLM) -> None:
    """Not those of the same text, of other sides, or in another order."""
    first, second, turned = noise(32, 160, 1), noise(32, 160, 2), Image.new("RGB", (32, 160))
    text = f"{PICTURE}{PICTURE}{TEXT}"

    def cached(*pictures: Image.Image, **options: int) -> int:
        given = {
            "prompt": text,
            "multi_modal_data": {"image": list(pictures)},
            "mm_processor_kwargs": options,
        }
        found = llm.generate(given, PARAMS, use_tqdm=False)[0].num_cached_tokens
        assert found is not None
        return found

    assert cached(first, second) == 0
    assert cached(second, first) == 0
    assert cached(first, turned) == 64  # of the first picture
    assert cached(first, second) == 160
    assert cached(first, second, max_pixels=1000) == 0
    late = first.copy()
    late.putpixel((159, 31), (1, 2, 3))
    assert cached(late, second) == 0
    assert cached(turned, second) == 0
    assert cached(turned.transpose(Image.Transpose.ROTATE_90), second) == 0  # of the same bytes
