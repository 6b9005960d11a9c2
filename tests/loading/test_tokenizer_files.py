"""tokenizer.json is what splits text, whatever class of transformers a checkpoint names."""

import json
import logging
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from nanovllm import SamplingParams, demo_model
from nanovllm.engine.detokenizer import Detokenizer
from nanovllm.engine.input_processor import InputProcessor
from nanovllm.errors import CheckpointError, InvalidRequestError
from nanovllm.loading import tokenizer_files
from nanovllm.loading.hub import Checkpoint, open_checkpoint
from nanovllm.loading.text_tokenizer import TextTokenizer
from nanovllm.loading.tokenizer import load_tokenizer, serving_tokenizer
from nanovllm.models.registry import MODULES
from tests.checkpoints import read_json, write_json
from tests.family_tokenizers import FAMILIES, LLAMA_2, LLAMA_3, PIECES, SPECIAL

TEXTS = [
    "",
    "In 2023 and 650841823, they're HERE.",
    "a\n\nb  \n c\t",
    "f(x) (foo) [bar] = {'a': 1};\r\n//",
    "नमस्ते दुनिया สวัสดีครับ مرحبا بالعالم 日本語",
    "e\u0301te\u0301 👩\u200d🚀\u00a0x",
    " hello",
    "hello  hello",
    "<|user|>hello<|end|> hello<|end|>\n<s>[INST] x",
    "<|im_start|>user\nhi<|im_end|>\n<think> so</think><|endoftext|>",
]


def write(path: Path, tokenizer: Tokenizer, **config: Any) -> Path:
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


def read(path: Path) -> TextTokenizer:
    found = serving_tokenizer(Checkpoint(path, {}, {}, path))
    assert found is not None
    return found


def settings_of(tokenizer: Tokenizer) -> dict[str, Any]:
    """Return what tokenizer_config.json says of a family's tokenizer."""
    first = PIECES if tokenizer.token_to_id(PIECES[1]) is not None else SPECIAL
    names = {"bos_token": first[1], "eos_token": first[2], "unk_token": first[0]}
    return {**names, "add_prefix_space": False, "clean_up_tokenization_spaces": True}


def streamed(tokenizer: Tokenizer, token_ids: list[int], *, skip: bool) -> str:
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip)
    for token_id in token_ids:
        detokenizer.add(token_id)
    detokenizer.finish()
    return detokenizer.text


def test_every_family_has_a_tokenizer_here() -> None:
    encoders = {"bert"}  # they write no text: tests/pooling/test_encoders.py
    assert FAMILIES.keys() == set(MODULES.values()) - encoders


@pytest.mark.parametrize("family", FAMILIES)
def test_ids_and_text_are_those_of_the_file_under_every_class_name(
    tmp_path: Path, family: str
) -> None:
    """Symptom: transformers 5's GPT2Tokenizer made two tokens of Phi-4's line breaks, its
    LlamaTokenizer put spaces elsewhere, and Gemma's class was refused.
    """
    for make in FAMILIES[family].makers:
        made = make()
        write(tmp_path, made)
        right = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
        expected = [
            (ids := right.encode(text, add_special_tokens=adds).ids, right.decode(ids), adds, text)
            for text in TEXTS
            for adds in (True, False)
        ]
        for name in (*FAMILIES[family].classes, None, "NoSuchTokenizer", 5):
            write(tmp_path, made, tokenizer_class=name, **settings_of(made))
            found = read(tmp_path)
            for ids, decoded, adds, text in expected:
                assert found.encode(text, add_special_tokens=adds) == ids, (name, text)
                assert found.decode(ids, skip_special_tokens=True) == decoded, (name, text)
                whole = right.decode(ids, skip_special_tokens=False)
                assert found.decode(ids) == whole
            assert found.added_tokens_decoder.keys() == right.get_added_tokens_decoder().keys()
        for ids, decoded, _, _ in expected:
            assert streamed(found.backend_tokenizer, ids, skip=True) == decoded
        full: Any = load_tokenizer(Checkpoint(tmp_path, {}, {}, tmp_path))
        for ids, decoded, adds, text in expected:  # what users are given
            assert full.encode(text, add_special_tokens=adds) == ids
            assert full.decode(ids, skip_special_tokens=True) == decoded
        assert full.get_vocab() == found.get_vocab() == right.get_vocab()
        assert full.special_tokens_map == found.special_tokens_map
        assert full.eos_token_id == found.eos_token_id is not None
        assert set(full.all_special_ids) == {
            token_id
            for token_id, token in right.get_added_tokens_decoder().items()
            if token.special
        }


TEMPLATES: dict[str, tuple[dict[str, Any], Any]] = {
    "none": ({}, None),
    "config": ({"tokenizer_config.json": {"chat_template": "c"}}, "c"),
    "list": (
        {
            "tokenizer_config.json": {
                "chat_template": [
                    {"name": "default", "template": "d"},
                    {"name": "tool_use", "template": "t"},
                ]
            }
        },
        {"default": "d", "tool_use": "t"},
    ),
    "processor": ({"chat_template.json": {"chat_template": "p"}}, "p"),
    "config first": (
        {
            "chat_template.json": {"chat_template": "p"},
            "tokenizer_config.json": {"chat_template": "c"},
        },
        "c",
    ),
    "file first": (
        {"chat_template.jinja": "é", "tokenizer_config.json": {"chat_template": "c"}},
        "é",
    ),
    "several": (
        {"chat_template.jinja": "d", "additional_chat_templates/tool_use.jinja": "t"},
        {"default": "d", "tool_use": "t"},
    ),
}


@pytest.mark.parametrize("case", TEMPLATES)
def test_where_the_chat_template_is(tmp_path: Path, case: str) -> None:
    files, expected = TEMPLATES[case]
    write(tmp_path, LLAMA_2())
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content if isinstance(content, str) else json.dumps(content))
    found = read(tmp_path)
    assert found.chat_template == expected
    full: Any = load_tokenizer(Checkpoint(tmp_path, {}, {}, tmp_path))
    assert full.chat_template == expected
    if expected is None:
        with pytest.raises(ValueError, match="no chat template"):
            found.get_chat_template()
        return
    for options in ((), ("x",), (None, []), (None, None)):
        assert found.get_chat_template(*options) == full.get_chat_template(*options)


def test_special_tokens_are_those_of_either_file(tmp_path: Path) -> None:
    write(
        tmp_path,
        LLAMA_2(),
        bos_token={"__type": "AddedToken", "content": "<s>", "lstrip": False},
        image_token="<|user|>",
        extra_special_tokens={"audio_token": "<|end|>"},
        add_bos_token=True,
        pad_token=None,
        sep_token="",
    )
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"eos_token": "</s>"}))
    found = read(tmp_path)
    assert found.special_tokens_map == {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "image_token": "<|user|>",
        "audio_token": "<|end|>",
    }
    assert found.eos_token_id == 2


def test_a_token_with_a_name_is_special(tmp_path: Path) -> None:
    """Old files have </s> in the vocabulary alone. A template writes it, and it is one token."""
    tokenizer = LLAMA_2()
    content = json.loads(tokenizer.to_str())
    content["added_tokens"] = [dict(token) for token in content["added_tokens"]][3:]
    content["added_tokens"][0]["special"] = False
    write(tmp_path, Tokenizer.from_str(json.dumps(content)), eos_token="</s>")
    config = {"eos_token": "</s>", "additional_special_tokens": ["<|user|>", "<none>"]}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    found = read(tmp_path)
    ids = found.encode("a</s><|user|>", add_special_tokens=False)
    assert found.convert_ids_to_tokens(ids) == ["▁a", "</s>", "<|user|>"]
    assert found.decode(ids, skip_special_tokens=True) == "a"
    assert "<none>" not in found.get_vocab()
    assert found.eos_token_id == 2


@pytest.mark.parametrize("file", ["tokenizer_config.json", "added_tokens.json"])
def test_tokens_that_only_another_file_lists(
    tmp_path: Path, file: str, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = LLAMA_2()
    size = tokenizer.get_vocab_size()
    ids = {"<new>": size, "<newer>": size + 1, "<far>": size + 9, "<s>": 1, "<0x41>": 3}
    write(tmp_path, tokenizer, eos_token="<new>")
    if file == "added_tokens.json":
        (tmp_path / file).write_text(json.dumps(ids))
    else:
        tokens = {
            str(token_id): {"content": text, "special": text == "<new>"}
            for text, token_id in ids.items()
        }
        content = {"eos_token": "<new>", "added_tokens_decoder": tokens}
        (tmp_path / file).write_text(json.dumps(content))
    with caplog.at_level(logging.WARNING):
        found = read(tmp_path)
    assert found.encode("<newer><new>", add_special_tokens=False) == [size + 1, size]
    assert found.eos_token_id == size
    assert found.decode([size + 1, size], skip_special_tokens=True) == "<newer>"
    others = f"'<0x41>' is {6 + 65}, not 3, '<far>' is None, not {size + 9}"
    assert f"{file} lists tokens with other ids than tokenizer.json, which counts: {others}\n" in (
        caplog.text
    )
    assert found.get_vocab().keys() - tokenizer.get_vocab().keys() == {"<new>", "<newer>"}


@pytest.mark.parametrize(
    ("make", "config", "said"),
    [
        (LLAMA_2, {"add_bos_token": True, "bos_token": "<s>", "add_eos_token": False}, None),
        (LLAMA_2, {"add_eos_token": True, "eos_token": "</s>"}, "add_eos_token=true; tokenizer.js"),
        (LLAMA_2, {"add_bos_token": False, "bos_token": "<s>"}, "which counts, adds '<s>'"),
        (LLAMA_3, {"add_bos_token": True, "bos_token": None}, None),
        (LLAMA_3, {"eos_token": "<|no|>"}, r"'<\|no\|>' is not a token of tokenizer.json"),
    ],
)
def test_tokenizer_json_says_what_is_put_around_a_text(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, make: Any, config: Any, said: str | None
) -> None:
    right = make()
    write(tmp_path, right, **config)
    with caplog.at_level(logging.WARNING):
        found = read(tmp_path)
    assert found.encode("hello") == right.encode("hello").ids
    assert (caplog.text == "") == (said is None)
    assert said is None or re.search(said, caplog.text)


def test_padding_and_cutting_of_the_file_are_left_out(tmp_path: Path) -> None:
    tokenizer = LLAMA_2()
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=9)
    found = read(write(tmp_path, tokenizer))
    assert found.encode("hello hello") == LLAMA_2().encode("hello hello").ids


def test_special_tokens_may_be_split(tmp_path: Path) -> None:
    found = read(write(tmp_path, LLAMA_2(), split_special_tokens=True))
    assert len(found.encode("<|end|>", add_special_tokens=False)) > 1


def changed(change: str) -> dict[str, Any]:
    """Return a tokenizer.json that says two things of one token."""
    content: dict[str, Any] = json.loads(LLAMA_2().to_str())
    vocab, added = content["model"]["vocab"], content["added_tokens"]
    size = len(vocab)
    extra = {**added[-1], "content": "<x>", "id": size}
    template = content["post_processor"]["special_tokens"]["<s>"]
    if change == "vocab":
        vocab["hell"] = vocab["he"]
    elif change == "added":
        added += [extra, {**extra, "content": "<y>"}]
    elif change == "taken":
        added.append({**extra, "id": 70})
    elif change == "gap":
        added.append({**extra, "id": size + 3})
    elif change == "other":
        added[3]["id"] = 4
    elif change == "empty":
        content["model"] |= {"vocab": {}, "merges": [], "unk_token": None}
        content["added_tokens"] = []
    elif change == "template":
        template["ids"] = [2]
    elif change == "no token":
        template["ids"] = [size]
    elif change == "merge":
        content["model"]["merges"] += [["a", "zz"]]
    elif change == "order":  # the vocabulary first
        content = {"model": content.pop("model"), **content}
        added[3]["id"] = 4
    return content


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("vocab", "tokens 'hell' and 'he' share id|tokens 'he' and 'hell' share id"),
        ("added", "added token '<y>' has id 298, but this is the id of '<x>'"),
        ("taken", "added token '<x>' has id 70, but this is the id of '<0x40>'"),
        ("gap", "added token '<x>' has id 301, but the next free id is 298"),
        ("other", r"added token '<\|user\|>' has id 4, but this is the id of '<\|end\|>'"),
        ("empty", "its vocabulary is empty"),
        ("template", "its post_processor adds '<s>' with id 2, which in its vocabulary is '</s>'"),
        ("no token", "its post_processor adds '<s>' with id 298, which in its vocabulary is None"),
        ("merge", "zz"),
        ("order", r"added token '<\|user\|>' has id 4"),
    ],
)
def test_a_file_that_contradicts_itself(tmp_path: Path, change: str, said: str) -> None:
    """The library takes most of these, and gives the tokens other ids."""
    (tmp_path / "tokenizer.json").write_text(json.dumps(changed(change)))
    with pytest.raises(CheckpointError, match=said) as raised:
        read(tmp_path)
    assert f"{tmp_path}: tokenizer.json is invalid" in str(raised.value)


# Files that are wrong. None is trusted: an error names what is wrong.


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return Path(shutil.copytree(demo_model.MODEL, tmp_path / "model"))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", b"{"),
        ("tokenizer.json", b"{}"),
        ("tokenizer.json", b"[" * 100_000),
        ("tokenizer.json", b"\xff\xfe"),
        ("tokenizer.json", b'{"added_tokens": 5, "model": {"type": "BPE"}}'),
        ("tokenizer_config.json", b"{"),
        ("tokenizer_config.json", b'{"a":' * 100_000),
        ("tokenizer_config.json", b"[]"),
        ("tokenizer_config.json", b'{"eos_token": 5}'),
        ("tokenizer_config.json", b'{"eos_token": {"content": 3}}'),
        ("tokenizer_config.json", b'{"added_tokens_decoder": {"5": 3}}'),
        ("tokenizer_config.json", b'{"added_tokens_decoder": {"x": {"content": "y"}}}'),
        ("tokenizer_config.json", b'{"chat_template": 5}'),
        ("tokenizer_config.json", b'{"chat_template": [{"name": "default"}]}'),
        ("added_tokens.json", b"["),
        ("added_tokens.json", b'{"<x>": "y"}'),
        ("chat_template.json", b"5"),
        ("chat_template.json", b'{"chat_template": [5]}'),
        ("chat_template.jinja", b"\xff"),
        ("special_tokens_map.json", b"{"),
        ("special_tokens_map.json", b'{"eos_token": [5]}'),
    ],
)
def test_a_broken_file_is_a_checkpoint_error_that_names_it(
    directory: Path, name: str, content: bytes
) -> None:
    if name != "chat_template.jinja":  # which comes before other templates
        (directory / "chat_template.jinja").unlink()
    (directory / name).write_bytes(content)
    with pytest.raises(CheckpointError) as raised:
        load_tokenizer(open_checkpoint(str(directory)))
    assert str(directory) in str(raised.value)
    assert name in str(raised.value)
    assert len(str(raised.value)) < 1000


def test_a_panic_of_the_tokenizers_library_is_a_checkpoint_error(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rust's panics reach Python as an exception that is no `Exception`."""

    class PanicException(BaseException):
        pass

    class Panicking:
        @staticmethod
        def from_buffer(_: bytes) -> None:
            raise PanicException("index out of range")

    monkeypatch.setattr(tokenizer_files, "Tokenizer", Panicking)
    with pytest.raises(CheckpointError, match="tokenizer.json is invalid: index out of range"):
        load_tokenizer(open_checkpoint(str(directory)))


@pytest.mark.parametrize("model_type", ["qwen3", "t5", "bert", 5, None, ["x"]])
def test_config_json_says_nothing_of_the_tokenizer(directory: Path, model_type: Any) -> None:
    """transformers' config of Qwen3 makes a list of num_hidden_layers names."""
    tokenizer = load_tokenizer(open_checkpoint(str(directory)))
    assert tokenizer is not None
    expected = tokenizer.encode("What is a KV cache?")
    changes: dict[str, dict[str, Any]] = {
        "config.json": {"model_type": model_type, "num_hidden_layers": 10**12},
        "tokenizer_config.json": {"auto_map": 5, "model_max_length": "x", "vocab_file": "/x"},
    }
    for name, fields in changes.items():
        write_json(directory / name, {**read_json(directory / name), **fields})
    found = load_tokenizer(open_checkpoint(str(directory)))
    assert found is not None
    assert found.encode("What is a KV cache?") == expected


def test_a_tokenizer_with_tokens_that_the_model_lacks(directory: Path) -> None:
    """Symptom: the embedding is read out of bounds."""
    tokenizer = serving_tokenizer(open_checkpoint(str(directory)))
    assert tokenizer is not None
    small = max(tokenizer.encode("What is a KV cache?"))
    processor = InputProcessor(tokenizer, vocab_size=small, max_model_len=64, seed=0)
    expected = f"made token {small} of the text; this model's last is {small - 1}"
    with pytest.raises(InvalidRequestError, match=expected):
        processor.make_request("What is a KV cache?")
    with pytest.raises(InvalidRequestError, match=expected):
        processor.make_request([1], SamplingParams(bad_words="What is a KV cache?"))
    InputProcessor(tokenizer, vocab_size=small + 1, max_model_len=64, seed=0).make_request(
        "What is a KV cache?"
    )
