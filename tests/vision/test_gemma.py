"""Gemma 3 and Gemma 4 read pictures as transformers does: small random models in float32, and the
same bits in bfloat16 however a prompt is computed.
"""

import functools
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma4Config,
    Gemma4ForConditionalGeneration,
    Gemma4UnifiedConfig,
    Gemma4UnifiedForConditionalGeneration,
    PreTrainedModel,
)
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil

from nanovllm import LLM, SamplingParams
from nanovllm.errors import InvalidRequestError, UnsupportedModelError
from nanovllm.features.vision import pixels
from nanovllm.features.vision.family import VisionFamily
from nanovllm.features.vision.gemma3 import Gemma3
from nanovllm.features.vision.gemma4 import Gemma4, Gemma4Unified
from nanovllm.kernels.cpu.library import library
from tests.vision import asking
from tests.vision.pictures import add_tokenizer

SOFT = 90
TEXT: dict[str, Any] = {
    **asking.TEXT,
    "pad_token_id": 0,
    "vocab_size": 128,
    "sliding_window": 10,  # shorter than the pictures
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
TOKENS = {
    "image_token_id": SOFT,
    "boi_token_id": 92,
    "eoi_token_id": 93,
    "video_token_id": 1001,  # no text has them
    "audio_token_id": 1002,
    "audio_config": None,
}
TOWER = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "patch_size": 4,
}


def gemma3() -> PreTrainedModel:
    config = Gemma3Config(
        text_config={**TEXT, "query_pre_attn_scalar": 16},
        vision_config={**TOWER, "image_size": 32},
        mm_tokens_per_image=16,
        image_token_index=SOFT,
    )
    return Gemma3ForConditionalGeneration(config)


def gemma4(text: dict[str, Any], **tower: Any) -> PreTrainedModel:
    config = Gemma4Config(
        text_config={**TEXT, "global_head_dim": 32, "vocab_size_per_layer_input": 128, **text},
        vision_config={
            **TOWER,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "position_embedding_size": 256,
            **tower,
        },
        **TOKENS,
    )
    return Gemma4ForConditionalGeneration(config)


def e2b() -> PreTrainedModel:
    """With embeddings for each layer and bounds, and causal."""
    text = {"hidden_size_per_layer_input": 8, "pad_token_id": 3}
    return gemma4(text, use_clipped_linears=True, standardize=True)


def large() -> PreTrainedModel:
    """Whose pictures see both ways in layers with a window."""
    return gemma4({"hidden_size_per_layer_input": 0, "use_bidirectional_attention": "vision"})


def unified() -> PreTrainedModel:
    config = Gemma4UnifiedConfig(
        text_config={**TEXT, "global_head_dim": 32},
        vision_config={
            "patch_size": 4,
            "mm_embed_dim": 32,
            "mm_posemb_size": 96,
            "output_proj_dims": 32,
        },
        **TOKENS,
    )
    return Gemma4UnifiedForConditionalGeneration(config)


MODELS = [gemma3, e2b, large, unified]
PROCESSORS = {"gemma3": {"image_mean": [0.5] * 3}}


def randomize(model: PreTrainedModel) -> PreTrainedModel:
    torch.manual_seed(0)
    for name, tensor in model.state_dict().items():
        last = name.rpartition(".")[2]
        if last in ("input_min", "output_min", "input_max", "output_max"):
            tensor.fill_((1.0 + torch.rand(()).item()) * (1 if last.endswith("max") else -1))
        else:
            centre = 1.0 if tensor.ndim == 1 and "bias" not in name else 0.0
            tensor.copy_(torch.randn_like(tensor) * (0.15 if tensor.ndim > 1 else 0.3) + centre)
            if name.endswith(("embed_tokens.weight", "lm_head.weight")):  # the same numbers
                tensor[SOFT] = 0.0  # so no answer has it
    return model.float().eval()


class Made:
    """A checkpoint, transformers' model of it, and its processor."""

    def __init__(self, make: Any, path: Path) -> None:
        self.name = make.__name__
        self.path = str(path)
        self.theirs = randomize(make())
        self.theirs.save_pretrained(path)
        processor = PROCESSORS.get(self.name, {"max_soft_tokens": 70})
        (path / "preprocessor_config.json").write_text(json.dumps(processor))

    def inputs(self, pictures: list[Image.Image]) -> tuple[list[int], dict[str, torch.Tensor]]:
        """Return the numbers of soft tokens, and what transformers' model takes of pictures."""
        if self.name == "gemma3":
            size = {"height": 32, "width": 32}
            found = Gemma3ImageProcessorPil(size=size)(pictures, return_tensors="pt")
            return [16] * len(pictures), {"pixel_values": found["pixel_values"]}
        processor = Gemma4ImageProcessorPil(patch_size=4, max_soft_tokens=70)
        found = processor(pictures, return_tensors="pt")
        values, places = found["pixel_values"], found["image_position_ids"]
        counts = found["num_soft_tokens_per_image"].tolist()
        if self.name == "unified":
            values, places = merged(values, places, counts)
        return counts, {"pixel_values": values, "image_position_ids": places}

    def ids(self, pictures: list[Image.Image], texts: list[list[int]]) -> list[int]:
        """Return texts with pictures between them."""
        found = list(texts[0])
        for count, text in zip(self.inputs(pictures)[0], texts[1:], strict=True):
            found += [92, *[SOFT] * count, 93, *text]
        return found

    def answer(self, pictures: list[Image.Image], ids: list[int]) -> tuple[list[int], list[float]]:
        """Return transformers' greedy tokens, and their log-probabilities."""
        types = torch.tensor([[int(token == SOFT) for token in ids]])
        name = "token_type_ids" if self.name == "gemma3" else "mm_token_type_ids"
        found = self.theirs.generate(  # type: ignore[operator]
            input_ids=torch.tensor([ids]),
            attention_mask=torch.ones(1, len(ids), dtype=torch.long),
            **{name: types},
            **self.inputs(pictures)[1],
            max_new_tokens=8,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
            cache_implementation="static",  # the unified model has other masks with other caches
        )
        logprobs = torch.cat(found.logits).log_softmax(-1).max(-1).values
        return found.sequences[0, len(ids) :].tolist(), logprobs.tolist()


def merged(
    values: torch.Tensor, places: torch.Tensor, counts: list[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return Gemma 4's small patches as those of the unified model, 3 x 3 in one."""
    found, grids = [], []
    for patches, place, count in zip(values, places, counts, strict=True):
        columns = (int(place[:, 0].max()) + 1) // 3
        rows = count // columns
        blocks = patches[: 9 * count].view(rows, 3, columns, 3, 4, 4, 3)
        squares = blocks.permute(0, 2, 1, 4, 3, 5, 6).reshape(count, -1)
        y, x = torch.arange(count) // columns, torch.arange(count) % columns
        found.append(torch.nn.functional.pad(squares, (0, 0, 0, 70 - count)))
        place = torch.stack([x, y], 1)
        grids.append(torch.nn.functional.pad(place, (0, 0, 0, 70 - count), value=-1))
    return torch.stack(found), torch.stack(grids)


@pytest.fixture(scope="module", params=MODELS, ids=lambda make: make.__name__)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    return Made(request.param, tmp_path_factory.mktemp(request.param.__name__))


@functools.cache
def expected_of(made: Made) -> list[tuple[list[int], list[float]]]:
    """Return transformers' answers to `PROMPTS`."""
    return [made.answer(*asked) for asked in prompts_of(made)]


def prompts_of(made: Made) -> list[tuple[list[Image.Image], list[int]]]:
    """Return the pictures and the tokens of `PROMPTS`."""
    found = []
    for sizes, texts in PROMPTS:
        # Those of one size differ.
        pictures = [picture(*size, seed=index) for index, size in enumerate(sizes)]
        found.append((pictures, made.ids(pictures, texts)))
    return found


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    numbers = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(numbers)


PROMPTS = [
    ([(30, 50)], [[], [1, 2, 3]]),
    ([(61, 17)], [[1, 2, 3, 4, 5], []]),
    ([(1, 1)], [[7, 8], [9, 10, 11]]),
    ([(1, 199)], [[7, 8], [9]]),
    ([(199, 1), (13, 7)], [[20, 21, 22], [23], [24, 25]]),
    ([(13, 7), (13, 7), (33, 40)], [[20], [], [23, 2, 2], [24, 25]]),
]
"""Sizes of pictures, and the texts around them."""


@pytest.mark.parametrize("budget", [512, 16])
def test_answers_are_those_of_transformers(made: Made, budget: int) -> None:
    """Whole prompts, and chunks that would cut pictures; then again, from the prefix cache."""
    llm = LLM(
        made.path,
        dtype="float32",
        device="cpu",
        max_model_len=256,
        max_num_batched_tokens=budget,
        max_num_seqs=3,
    )
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=1)
    pictures, asked = zip(*prompts_of(made), strict=True)
    prompts = [
        {"prompt_token_ids": ids, "multi_modal_data": {"image": some}}
        for ids, some in zip(asked, pictures, strict=True)
    ]
    expected = expected_of(made)
    for turn in range(2):
        outputs = llm.generate([*prompts, [1, 2, 3]], params, use_tqdm=False)
        for output, (tokens, logprobs) in zip(outputs, expected, strict=False):
            found = output.outputs[0]
            assert list(found.token_ids) == tokens
            assert found.logprobs is not None
            ours = [step[token].logprob for step, token in zip(found.logprobs, tokens, strict=True)]
            assert ours == pytest.approx(logprobs, rel=2e-4, abs=2e-4)
        # Blocks of 16 tokens: some hits end inside a picture.
        hits = [output.num_cached_tokens or 0 for output in outputs[:-1]]
        assert not turn or all(hits)
        inside = zip(hits, asked, strict=True)
        assert not turn or any(ids[hit - 1] == ids[hit] == SOFT for hit, ids in inside)


@pytest.mark.skipif(library() is None, reason="no compiler here")
def test_bits_do_not_depend_on_how_a_prompt_is_computed(made: Made) -> None:
    """In bfloat16: alone, in a batch, in chunks, from the prefix cache, and after a preemption."""
    pictures = [picture(30, 50), picture(61, 17)]
    ids = made.ids(pictures, [[1, 2, 3], [4, 5], [8, 9, 10]])
    prompt = {"prompt_token_ids": ids, "multi_modal_data": {"image": pictures}}
    swapped = {"prompt_token_ids": ids, "multi_modal_data": {"image": pictures[::-1]}}
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, logprobs=1)
    found = []
    num_preemptions = 0
    for batch, budget, options in (
        ([prompt], 512, {"enforce_eager": True}),
        ([prompt], 7, {}),
        ([[1, 2, 3] * 10, prompt, swapped], 23, {}),
        (
            [prompt, swapped, swapped],
            64,
            {"num_kvcache_blocks": 12 if made.name == "gemma3" else 16},
        ),
    ):
        llm = LLM(
            made.path,
            dtype="bfloat16",
            device="cpu",
            max_model_len=256,
            max_num_batched_tokens=budget,
            max_num_seqs=4,
            kvcache_block_size=32,
            **options,
        )
        for _ in range(2):
            outputs = llm.generate(batch, params, use_tqdm=False)
            own = next(output for output in outputs if output.prompt_token_ids == ids).outputs[0]
            found.append((list(own.token_ids), own.cumulative_logprob))
        num_preemptions += llm.engine.scheduler.stats.num_preemptions
    assert all(each == found[0] for each in found)
    assert num_preemptions


def test_a_large_picture_for_a_tower_without_layers(tmp_path: Path) -> None:
    """Beside rows its parts are those of several steps, and the first of these computes all."""
    made = Made(unified, tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())
    fields["text_config"]["max_position_embeddings"] = 1400
    (tmp_path / "config.json").write_text(json.dumps(fields))
    ids = [1, 92, *[SOFT] * 33**2, 93, 2]
    prompt = {"prompt_token_ids": ids, "multi_modal_data": {"image": picture(400, 400)}}
    llm = LLM(
        made.path,
        dtype="float32",
        device="cpu",
        max_model_len=1400,
        mm_processor_kwargs={"max_soft_tokens": 1120},
    )
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    beside_rows = llm.generate([[1, 2, 3], prompt], params, use_tqdm=False)[1]
    llm.reset_prefix_cache()
    alone = llm.generate([prompt], params, use_tqdm=False)[0]
    assert beside_rows.outputs[0].token_ids == alone.outputs[0].token_ids


@pytest.mark.parametrize(
    ("make", "marker", "around"),
    [
        (gemma3, "<start_of_image>", ("\n\n<start_of_image>", "<end_of_image>\n\n")),
        (unified, "<|image|>", ("<|image>", "<image|>")),
    ],
)
def test_a_marker_becomes_what_the_processors_write(
    make: Any, marker: str, around: tuple[str, str], tmp_path: Path
) -> None:
    """In text; in token ids, one soft token stands for all, or all are there."""
    made = Made(make, tmp_path)
    family = FAMILIES[made.name]
    special = list(dict.fromkeys([marker, *map(str.strip, around), family.soft_token]))
    ids = add_tokenizer(tmp_path, special, "{{ messages[0].content }}")
    fields = json.loads((tmp_path / "config.json").read_text())
    soft = ids[family.soft_token]
    fields |= {"image_token_index" if make is gemma3 else "image_token_id": soft}
    fields["text_config"]["vocab_size"] = max(ids.values()) + 1
    (tmp_path / "config.json").write_text(json.dumps(fields))
    llm = LLM(made.path, dtype="float32", device="cpu", max_model_len=256, load_format="dummy")
    tokenizer = llm.get_tokenizer()
    image = picture(30, 50)
    [count] = made.inputs([image])[0]
    whole = f"one{around[0]}{family.soft_token * count}{around[1]}two"
    expected = tokenizer.encode(whole)
    asked = [f"one{marker}two", expected, [*expected[:1], soft, *expected[-1:]]]
    for prompt in asked:
        kind = "prompt" if isinstance(prompt, str) else "prompt_token_ids"
        output = llm.generate(
            {kind: prompt, "multi_modal_data": {"image": image}},
            SamplingParams(max_tokens=1),
            use_tqdm=False,
        )[0]
        assert output.prompt_token_ids is not None
        assert output.prompt_token_ids.count(soft) == count
        assert prompt is asked[2] or output.prompt_token_ids == expected


FAMILIES: dict[str, VisionFamily] = {
    "gemma3": Gemma3({"text_config": {"hidden_size": 64}, "vision_config": {"patch_size": 14}}, {}),
    "e2b": Gemma4({"text_config": {"hidden_size": 64}, "vision_config": {}}, {}),
    "unified": Gemma4Unified({"text_config": {"hidden_size": 64}, "vision_config": {}}, {}),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_pixels_are_those_of_transformers(name: str) -> None:
    family = FAMILIES[name]
    rng = random.Random(name)
    gemma3_processor = Gemma3ImageProcessorPil(size={"height": 896, "width": 896})
    for index in range(8):
        longest = 10 ** rng.uniform(0, 3.2)
        size = [max(1, round(longest / 10 ** rng.uniform(0, 2.5))) for _ in range(2)]
        image = picture(*size, seed=index)
        options = {} if name == "gemma3" else {"max_soft_tokens": rng.choice((70, 140, 280))}
        layout = family.layout(image.width, image.height, options)
        [view] = layout.views
        [rgb] = pixels.resized(image, layout.views, family.resample)
        numbers = torch.frombuffer(bytearray(rgb), dtype=torch.uint8)
        ours = family.patches(family.normalized(numbers, view.size))
        if name == "gemma3":
            found = gemma3_processor(image, return_tensors="pt")["pixel_values"][0]
            theirs = family.patches(found.permute(1, 2, 0))
        else:
            found = Gemma4ImageProcessorPil(**options)(image, return_tensors="pt")
            [count] = found["num_soft_tokens_per_image"].tolist()
            assert layout.num_tokens == count
            rows, columns = view.height // 16, view.width // 16
            small = found["pixel_values"][0, : rows * columns].view(rows, columns, 16, 16, 3)
            theirs = family.patches(small.transpose(1, 2).reshape(view.height, view.width, 3))
            if name == "e2b":  # whose model makes [-1, 1] of [0, 1]
                theirs = 2 * (theirs - 0.5)
        assert (ours - theirs).abs().max() <= 2e-7


def test_what_cannot_be_read_is_refused_by_name(tmp_path: Path) -> None:
    family = FAMILIES["e2b"]
    with pytest.raises(InvalidRequestError, match="max_soft_tokens must be one of 70, .*, got 100"):
        family.layout(30, 30, {"max_soft_tokens": 100})
    with pytest.raises(InvalidRequestError, match="'do_pan_and_scan', which this model does not"):
        FAMILIES["gemma3"].layout(30, 30, {"do_pan_and_scan": True})
    with pytest.raises(UnsupportedModelError, match="do_pan_and_scan is true"):
        Gemma3(FAMILIES["gemma3"].config, {"do_pan_and_scan": True})
    made = Made(large, tmp_path)
    llm = LLM(made.path, dtype="float32", device="cpu", max_model_len=256)
    prompt: dict[str, Any] = {
        "prompt_token_ids": [1, SOFT, 2],
        "multi_modal_data": {"image": picture(30, 30)},
        "mm_processor_kwargs": {"max_soft_tokens": 140},
    }
    with pytest.raises(InvalidRequestError, match="at most 70 do: raise that at start"):
        llm.generate(prompt, use_tqdm=False)
    text = LLM(made.path, device="cpu", max_model_len=256, limit_mm_per_prompt={"image": 0})
    assert text.engine.worker_info.kv.picture_tokens == 0
