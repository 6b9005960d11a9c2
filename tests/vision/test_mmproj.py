"""GGUF files with an mmproj file beside them see as the checkpoints do that they were made of."""

import functools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import gguf
import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from nanovllm import LLM, demo_model
from nanovllm.errors import CheckpointError, ConfigError, NanoVLLMError
from nanovllm.features.vision.family import VisionFamily
from nanovllm.features.vision.rank_vision import load_tower
from nanovllm.features.vision.tower import VisionTower
from nanovllm.kernels.torch_kernels import TORCH
from nanovllm.loading.gguf_families import FAMILIES
from nanovllm.loading.hub import configured_checkpoint
from nanovllm.loading.mmproj import PROJECTORS, can_see
from nanovllm.loading.mmproj_files import best_name
from nanovllm.options.config import Config
from nanovllm.parallel.rank_setup import check_networks
from tests.gguf_converter import convert
from tests.mmproj_converter import CLIP, HALF, tensors, write_mmproj
from tests.vision import test_gemma
from tests.vision.asking import SOFT, tokenizer_of
from tests.vision.family_cases import CASES
from tests.vision.pictures import PARAMS, noise, randomized, told
from tests.vision.qwen import (
    PICTURE,
    PROCESSOR,
    SPECIAL,
    TEMPLATE,
    by_transformers,
    make_model,
)

IDS = {token: 1024 + index for index, token in enumerate(SPECIAL)}
"""Behind those of the demo model."""


GEMMA = ("gemma3", "e2b", "large", "unified")


class Made(NamedTuple):
    """How a model is made, and what its files are called."""

    make: Callable[[], PreTrainedModel]
    architecture: str
    """llama.cpp's, of the text model."""
    soft: str
    soft_id: int
    processor: Mapping[str, Any] = {}
    metadata: Mapping[str, Any] = {}


def by_case(name: str) -> PreTrainedModel:
    from transformers import AutoModelForImageTextToText

    config: Any = CASES[name].config()
    if name == "qwen2.5":
        config.vision_config.window_size = 112  # of all published models: no file has it
    return randomized(AutoModelForImageTextToText.from_config(config))


def gemma(make: Callable[[], PreTrainedModel]) -> PreTrainedModel:
    return test_gemma.randomize(make())


_CLIP = {"image_mean": CLIP[0], "image_std": CLIP[1]}
_HALF = {"image_mean": HALF[0], "image_std": HALF[1]}
_PIXELS = {"min_pixels": 3136, "max_pixels": 12845056}
_EXPERTS = {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 24}
_DEEP = {"n_deepstack_layers": 2, "rope.dimension_sections": [4, 2, 2, 0]}
_PAD = "<|image_pad|>"
_ABSENT = {
    "hidden_size_per_layer_input": 0,
    "num_kv_shared_layers": 0,
    "use_double_wide_mlp": False,
    "num_global_key_value_heads": None,
}
"""What the config of Gemma 4 12B does not say."""
MADE = {
    "gemma3": Made(
        functools.partial(gemma, test_gemma.gemma3),
        "gemma3",
        "<image_soft_token>",
        90,
        _HALF,
        {"attention.sliding_window_pattern": [True, False] * 2},
    ),
    **{
        make.__name__: Made(functools.partial(gemma, make), "gemma4", "<|image|>", 90)
        for make in (test_gemma.e2b, test_gemma.large, test_gemma.unified)
    },
    "lfm2": Made(
        functools.partial(by_case, "lfm2"),
        "lfm2",
        "<image>",
        SOFT,
        _HALF,
        {"feed_forward_length": 64},
    ),
    "pixtral": Made(functools.partial(by_case, "pixtral"), "llama", "[IMG]", SOFT, _CLIP),
    "qwen2.5": Made(
        functools.partial(by_case, "qwen2.5"),
        "qwen2vl",
        _PAD,
        SOFT,
        {**_CLIP, **_PIXELS},
        {"rope.dimension_sections": [2, 3, 3, 0]},
    ),
    "qwen3-moe": Made(
        functools.partial(by_case, "qwen3-moe"),
        "qwen3vlmoe",
        _PAD,
        SOFT,
        _HALF,
        {**_EXPERTS, **_DEEP},
    ),
    "qwen3.5": Made(
        functools.partial(make_model, "qwen3_5", IDS),
        "qwen35",
        _PAD,
        IDS[_PAD],
        _HALF,
        {"rope.dimension_sections": [2, 1, 1, 0]},
    ),
    "qwen3": Made(
        functools.partial(make_model, "qwen3_vl", IDS), "qwen3vl", _PAD, IDS[_PAD], _HALF, _DEEP
    ),
}


def write_text(made: Made, model: PreTrainedModel, file: Path, **metadata: Any) -> Path:
    """Write the text model, with tokens."""
    config: Any = model.config
    weights = {
        name.replace("model.language_model.", "model."): tensor
        for name, tensor in model.state_dict().items()
        if name.startswith(("model.language_model.", "lm_head"))
    }
    tokens = [f"w{index}" for index in range(config.text_config.vocab_size)]
    tokens[made.soft_id] = made.soft
    own: dict[str, Any] = {"tokenizer.ggml.tokens": tokens, **made.metadata, **metadata}
    if (pad := config.text_config.pad_token_id) is not None:
        own["tokenizer.ggml.padding_token_id"] = pad
    fields = {**_ABSENT, **config.text_config.to_dict()}
    fields["tie_word_embeddings"] = config.tie_word_embeddings
    own_config = SimpleNamespace(to_dict=lambda: fields)
    text: Any = SimpleNamespace(config=own_config, state_dict=lambda: weights)
    return Path(convert(text, file, made.architecture, metadata=own))


@pytest.fixture(scope="module", params=list(MADE))
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, PreTrainedModel, Path]:
    """A case, its model, and a folder with its checkpoint, "full", and its files."""
    return make_pair(request.param, tmp_path_factory.mktemp(request.param))


def make_pair(name: str, path: Path) -> tuple[str, PreTrainedModel, Path]:
    made = MADE[name]
    model = made.make()
    model.save_pretrained(path / "full")
    (path / "full" / "preprocessor_config.json").write_text(json.dumps(made.processor))
    write_text(made, model, path / "model-F32.gguf")
    write_mmproj(model, path / "mmproj-F32.gguf")
    return name, model, path


def loaded(path: Path, **options: Any) -> tuple[VisionFamily, VisionTower]:
    """Return what reads pictures of a checkpoint, or of a GGUF file."""
    config = Config(str(path), dtype="float32", **options)
    spec, _ = check_networks(config, configured_checkpoint(config))
    assert spec.vision is not None
    return spec.vision, load_tower(spec.vision, spec, torch.device("cpu"), TORCH)


def facts(family: VisionFamily) -> list[Any]:
    """Return what a family does."""
    sides = [(100, 77), (17, 190), (900, 600)]
    names = ("marker", "soft_token", "soft_token_id", "axes", "patch", "merge", "mean", "std")
    see = [family.tokens_that_see_each_other({}, has_window=each) for each in (True, False)]
    own = [getattr(family, name) for name in names]
    return [*own, *see, *(family.layout(*size, {}) for size in sides)]


def test_a_tower_is_that_of_the_checkpoint(pair: tuple[str, PreTrainedModel, Path]) -> None:
    """Every number of it, and all that decides what pictures become."""
    _, _, path = pair
    (theirs, reference), (ours, tower) = (
        loaded(path / name) for name in ("full", "model-F32.gguf")
    )
    assert facts(ours) == facts(theirs)
    assert repr(tower.config) == repr(reference.config)
    found = tower.state_dict()
    for name, tensor in reference.state_dict().items():
        tolerance = 2e-7 if name == "merger.norm.weight" else 0.0  # Gemma 3's, plus 1, minus 1
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=tolerance)


LIMITS: dict[str, dict[str, Any]] = {
    "gemma4": {"max_soft_tokens": 70},
    "lfm2": {"max_image_tokens": 16, "min_image_tokens": 4, "do_image_splitting": False},
    **{name: {"min_pixels": 64} for name in ("qwen2vl", "qwen35", "qwen3vl", "qwen3vlmoe")},
}
"""Of the sizes of pictures, by the text model."""


@pytest.mark.long
def test_answers_are_those_of_the_checkpoint(pair: tuple[str, PreTrainedModel, Path]) -> None:
    name, _, path = pair
    made = MADE[name]
    options: dict[str, Any] = {"skip_tokenizer_init": True}
    if name in CASES:
        tokenizer_of(CASES[name]).save(str(path / "full" / "tokenizer.json"))
        options = {"tokenizer": str(path / "full")}
    options["mm_processor_kwargs"] = LIMITS.get(made.architecture)
    pictures = [noise(41, 33, 1), noise(17, 61, 2)]
    found = []
    for file in ("full", "model-F32.gguf"):
        family, _ = loaded(path / file)
        soft = [made.soft_id]  # stands for all tokens of a picture, if none of them is text
        whole = [
            soft * family.layout(*picture.size, options["mm_processor_kwargs"] or {}).num_tokens
            for picture in pictures
        ]
        first, second = whole if name in GEMMA else (soft, soft)
        prompt = {"prompt_token_ids": [5, *first, 6, 7, *second, 8]}
        llm = LLM(str(path / file), dtype="float32", max_model_len=384, **options)
        given = [{**prompt, "multi_modal_data": {"image": pictures}}, [5, 6, 7]]
        found.append([told(each) for each in llm.generate(given, PARAMS, use_tqdm=False)])
        llm.shutdown()
    for (ours, total), (theirs, expected) in zip(*found, strict=True):
        assert ours == theirs
        assert total == pytest.approx(expected, rel=2e-4, abs=2e-4)


def demo_tokenizer() -> dict[str, Any]:
    """Return the metadata of the demo model's tokenizer with `SPECIAL`, and a template."""
    found = json.loads((Path(demo_model.MODEL) / "tokenizer.json").read_text())
    texts = {**found["model"]["vocab"], **IDS}
    texts |= {token["content"]: token["id"] for token in found["added_tokens"]}
    special = {token["content"] for token in found["added_tokens"]} | {*SPECIAL}
    tokens = [f"[PAD{index}]" for index in range(1030)]
    for text, index in texts.items():
        tokens[index] = text
    merges = (
        each if isinstance(each, str) else " ".join(each) for each in found["model"]["merges"]
    )
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token in special else 1 for token in tokens],
        "tokenizer.ggml.merges": [*merges],
        "tokenizer.chat_template": TEMPLATE,
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files of Qwen3-VL with a real tokenizer."""
    path = tmp_path_factory.mktemp("mmproj")
    model = make_model("qwen3_vl", IDS)
    write_text(MADE["qwen3"], model, path / "Sees-F32.gguf", **demo_tokenizer())
    write_mmproj(model, path / "mmproj-Sees-F32.gguf", metadata=_AS_PROCESSED)
    return path


_AS_PROCESSED = {
    "clip.vision.image_mean": PROCESSOR["image_mean"],
    "clip.vision.image_std": PROCESSOR["image_std"],
    "clip.vision.image_min_pixels": 64,
    "clip.vision.image_max_pixels": 6000,
}
"""What `processed` does, in a file."""
FEW = {"max_model_len": 384, "max_num_seqs": 4, "device": "cpu"}


def test_a_conversation_is_that_of_transformers(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The marker comes from the file's template, its token from its vocabulary."""
    picture = noise(30, 50)
    content = [{"type": "image", "image": picture}, {"type": "text", "text": "What is it?"}]
    with caplog.at_level("INFO"):
        llm = LLM(str(folder / "Sees-F32.gguf"), dtype="float32", **FEW)
    assert "mmproj-Sees-F32.gguf reads pictures for Sees-F32.gguf" in caplog.text
    (output,) = llm.chat([{"role": "user", "content": content}], PARAMS, use_tqdm=False)
    llm.shutdown()
    assert output.prompt_token_ids.count(IDS[_PAD]) > 10
    model = make_model("qwen3_vl", IDS)
    tokens, total, _ = by_transformers(model, output.prompt_token_ids, [picture])
    found, found_total = told(output)
    assert found == tokens
    assert found_total == pytest.approx(total, rel=2e-4, abs=2e-4)


def test_bits_do_not_depend_on_chunks(folder: Path) -> None:
    given = {"prompt": f"What{PICTURE}is it?", "multi_modal_data": {"image": noise(61, 47)}}
    found = []
    for budget in (384, 11):
        llm = LLM(str(folder / "Sees-F32.gguf"), max_num_batched_tokens=budget, **FEW)
        found += [told(llm.generate(given, PARAMS, use_tqdm=False)[0]) for _ in range(2)]
        llm.shutdown()
    assert found == [found[0]] * 4


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0"])
def test_types(folder: Path, tmp_path: Path, kind: str) -> None:
    """Numbers of few bits are those that the gguf package reads."""
    model = make_model("qwen3_vl", IDS)
    file = write_mmproj(model, tmp_path / "see.gguf", kind=kind)
    reader = gguf.GGUFReader(file)
    stored = {
        tensor.name: gguf.dequantize(tensor.data, tensor.tensor_type) for tensor in reader.tensors
    }
    assert {tensor.tensor_type.name for tensor in reader.tensors} == {"F32", kind}
    _, tower = loaded(folder / "Sees-F32.gguf", mmproj=str(file))
    found = tower.state_dict()
    for ours, name in {
        "layers.1.attn.qkv.weight": "v.blk.1.attn_qkv.weight",
        "layers.2.mlp.fc1.weight": "v.blk.2.ffn_up.weight",
        "merger.linear_fc2.weight": "mm.2.weight",
        "deepstack.1.linear_fc1.weight": "v.deepstack.1.fc1.weight",
    }.items():
        np.testing.assert_array_equal(found[ours].numpy(), stored[name])


def test_old_files_have_the_linears_of_an_mlp_the_other_way_round(tmp_path: Path) -> None:
    _, model, path = make_pair("gemma3", tmp_path)
    _, expected = loaded(path / "model-F32.gguf")
    swapped = {
        name.replace(".ffn_up.", ".ffn_down.")
        if ".ffn_up." in name
        else name.replace(".ffn_down.", ".ffn_up."): tensor
        for name, tensor in tensors(model)
        if ".ffn_" in name
    }
    write_mmproj(model, path / "mmproj-F32.gguf", extra=swapped)
    _, found = loaded(path / "model-F32.gguf")
    for name, tensor in expected.state_dict().items():
        assert torch.equal(found.state_dict()[name], tensor), name


def test_a_vocabulary_without_the_soft_token(tmp_path: Path) -> None:
    """Gemma 3's published files have no <image_soft_token>."""
    made = MADE["gemma3"]._replace(soft="<unused98>")
    model = made.make()
    write_mmproj(model, tmp_path / "mmproj-F32.gguf")
    family, _ = loaded(write_text(made, model, tmp_path / "model.gguf"))
    assert (family.soft_token, family.soft_token_id) == ("<unused98>", 90)


NAMES = [
    (["a-Q4_0.gguf"], None),
    (["a-Q4_0.gguf", "mmproj-F16.gguf"], "mmproj-F16.gguf"),
    (["a-Q4_0.gguf", "mmproj-F32.gguf", "mmproj-F16.gguf", "mmproj-BF16.gguf"], "mmproj-BF16.gguf"),
    (["a-Q4_0.gguf", "mmproj-Q8_0.gguf", "mmproj-f32.gguf", "mmproj-f16.gguf"], "mmproj-f16.gguf"),
    (["a-Q4_0.gguf", "b-Q4_0.gguf", "mmproj-model-f16.gguf"], "mmproj-model-f16.gguf"),
    (["a-Q4_0.gguf", "b-Q4_0.gguf", "mmproj-b-F16.gguf"], None),
    (["a-Q4_0.gguf", "mmproj-b-F16.gguf"], "mmproj-b-F16.gguf"),
    (["a-Q4_0.gguf", "mmproj-BF16.gguf", "mmproj-A-Q8_0.gguf"], "mmproj-A-Q8_0.gguf"),
    (["a-Q4_0.gguf", "a.mmproj-Q8_0.gguf"], "a.mmproj-Q8_0.gguf"),
    (["a-Q4_0.gguf", "mmproj-a-F16.gguf", "a.mmproj-f16.gguf"], CheckpointError),
    (["a-Q4_0.gguf", "mmproj-F16.gguf", "mmproj-model-f16.gguf"], CheckpointError),
]


@pytest.mark.parametrize(("names", "expected"), NAMES)
def test_the_file_beside_a_model(names: list[str], expected: Any) -> None:
    is_one = sum("mmproj" not in name for name in names) < 2
    if isinstance(expected, type):
        with pytest.raises(expected, match="may each read pictures for a-Q4_0.gguf: name one in"):
            best_name(names[0], names, is_one=is_one)
    else:
        assert best_name(names[0], reversed(names), is_one=is_one) == expected


def test_what_is_not_looked_for(folder: Path) -> None:
    """Without pictures no tower is loaded; nor where the text model never has one."""
    config = Config(str(folder / "Sees-F32.gguf"), limit_mm_per_prompt={"image": 0})
    assert configured_checkpoint(config).mmproj is None
    assert can_see("qwen35")
    assert not can_see("qwen3")
    assert {name for each in PROJECTORS.values() for name in each.texts} <= {*FAMILIES}


def test_the_kv_of_another_tower_is_apart(folder: Path, tmp_path: Path) -> None:
    """Of two files one number differs."""
    model = make_model("qwen3_vl", IDS)
    bias = dict(tensors(model))["mm.2.bias"].clone()
    bias[3] += 1
    other = write_mmproj(
        model, tmp_path / "see.gguf", metadata=_AS_PROCESSED, extra={"mm.2.bias": bias}
    )
    spaces = []
    for mmproj in (None, str(other), str(folder / "mmproj-Sees-F32.gguf")):
        options = {"mmproj": mmproj, "kv_cache_dir": str(tmp_path / "kv"), **FEW}
        llm = LLM(str(folder / "Sees-F32.gguf"), **options)
        llm.generate("What is it? " * 30, PARAMS, use_tqdm=False)
        llm.shutdown()
        spaces.append({space.name for space in (tmp_path / "kv").iterdir()})
    assert len(spaces[0]) == 1
    assert spaces[0] < spaces[1] == spaces[2]


def changed(**metadata: Any) -> Callable[[Path], Path]:
    """Return what writes a file with other fields."""
    given = {f"clip.{key.replace('__', '.')}": value for key, value in metadata.items()}

    def write(path: Path) -> Path:
        return write_mmproj(make_model("qwen3_vl", IDS), path / "see.gguf", metadata=given)

    return write


def of_gemma(path: Path) -> Path:
    return write_mmproj(MADE["gemma3"].make(), path / "see.gguf")


def shortened(path: Path) -> Path:
    file = changed()(path)
    file.write_bytes(file.read_bytes()[:-4000])
    return file


def of_fewer_layers(path: Path) -> Path:
    model: Any = make_model("qwen3_vl", IDS)
    model.config.vision_config.deepstack_visual_indexes = [0]
    del model.model.visual.deepstack_merger_list[1]
    return write_mmproj(model, path / "see.gguf")


def with_more(path: Path) -> Path:
    extra = {"v.class_embd": torch.zeros(32), "mm.0.bias": torch.zeros(5)}
    return write_mmproj(make_model("qwen3_vl", IDS), path / "see.gguf", extra=extra)


WRONG: list[tuple[Callable[[Path], Path], str]] = [
    (of_gemma, "is not for .*Sees-F32.gguf: clip.projector_type gemma3 is for gemma3, and this is"),
    (
        changed(vision__projection_dim=65),
        "projection_dim 65 must be the model's embedding_length, 64",
    ),
    (of_fewer_layers, "it has 1 deepstack layers, the model says 2"),
    (
        changed(has_vision_encoder=False),
        "reads no pictures .*audio is not supported: give the mmpr",
    ),
    (
        changed(projector_type="idefics3"),
        "clip.projector_type .*idefics3.* it must be one of gemma3",
    ),
    (changed(vision__feature_layer=3), "clip.vision.feature_layer 3 is not supported"),
    (changed(vision__image_std=[0.5]), "clip.vision.image_std must be a list of 3 numbers"),
    (changed(vision__block_count=None), "clip.vision.block_count must be .* None"),
    (changed(vision__is_deepstack_layers=[True]), "is_deepstack_layers must be a list of 3 bool"),
    (changed(vision__embedding_length=40), "misshapen v?.*patch_embed"),
    (with_more, "unexpected v.class_embd"),
    (shortened, "ends at byte .* of a file of .*: download the file again"),
    (lambda path: path / "no.gguf", "no.gguf' does not exist"),
    (lambda path: path / "no.bin", "no.bin' must be the name of a GGUF file"),
]


@pytest.mark.parametrize(("write", "message"), WRONG)
def test_wrong_files(
    folder: Path, tmp_path: Path, write: Callable[[Path], Path], message: str
) -> None:
    with pytest.raises(NanoVLLMError, match=f"(?s){message}"):
        loaded(folder / "Sees-F32.gguf", mmproj=str(write(tmp_path)))


def test_a_file_beside_a_model_of_a_kind_that_is_not_read(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody asked for it: the text model runs alone."""
    model = tmp_path / "model.gguf"
    model.symlink_to(folder / "Sees-F32.gguf")
    changed(projector_type="idefics3")(tmp_path).rename(tmp_path / "mmproj-F16.gguf")
    config = Config(str(model))
    spec, _ = check_networks(config, configured_checkpoint(config))
    assert spec.vision is None
    assert "runs without pictures" in caplog.text
    assert "idefics3" in caplog.text


def test_files_in_the_wrong_place(folder: Path, tmp_path: Path) -> None:
    text, see = str(folder / "Sees-F32.gguf"), str(folder / "mmproj-Sees-F32.gguf")
    with pytest.raises(CheckpointError, match=r"is a text model \(qwen3vl\), and no mmproj file"):
        loaded(Path(text), mmproj=text)
    with pytest.raises(CheckpointError, match="is an mmproj file, .*: name the file of the model"):
        loaded(Path(see))
    model = MADE["qwen3"]._replace(soft="w5")
    file = write_text(model, make_model("qwen3_vl", IDS), tmp_path / "model.gguf")
    with pytest.raises(CheckpointError, match=r"tokens has no <\|image_pad\|>"):
        loaded(file, mmproj=see)
    with pytest.raises(ConfigError, match="is for a model in a GGUF file, and .* is none"):
        configured_checkpoint(Config(str(demo_model.MODEL), mmproj=see))
