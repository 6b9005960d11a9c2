"""Tokenizer files are a checkpoint's, so they are not trusted: an error names what is wrong."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from nanovllm import SamplingParams, demo_model
from nanovllm.engine.input_processor import InputProcessor
from nanovllm.errors import CheckpointError, InvalidRequestError
from nanovllm.loading import tokenizer_files
from nanovllm.loading.hub import open_checkpoint
from nanovllm.loading.tokenizer import load_tokenizer, serving_tokenizer


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return Path(shutil.copytree(demo_model.MODEL, tmp_path / "model"))


def change(file: Path, **fields: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


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
    change(directory / "config.json", model_type=model_type, num_hidden_layers=10**12)
    change(directory / "tokenizer_config.json", auto_map=5, model_max_length="x", vocab_file="/x")
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
