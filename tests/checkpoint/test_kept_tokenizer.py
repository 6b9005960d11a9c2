"""A tokenizer that was kept does what transformers does, and is made again when a file changes."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from nanovllm import demo_model
from nanovllm.checkpoint import kept_tokenizer, tokenizer
from nanovllm.checkpoint.hub import open_checkpoint
from nanovllm.checkpoint.kept_tokenizer import KeptTokenizer, fields_of, read_kept
from nanovllm.checkpoint.tokenizer import load_tokenizer, serving_tokenizer

TEXTS = st.text(max_size=40) | st.sampled_from(
    ["<|im_start|>user\nHi<|im_end|>", "né 🦊\u200d", " a  b\t\n", "<|endoftext|>x", "<s>a</s>"]
)


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return Path(shutil.copytree(demo_model.MODEL, tmp_path / "model"))


def change(file: Path, **fields: Any) -> None:
    old = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps({**old, **fields}))


def kept_files() -> list[Path]:
    return list(Path(os.environ["XDG_CACHE_HOME"], "nanovllm").glob("tokenizer-*.json"))


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"add_bos_token": True, "bos_token": "<|im_start|>"},
        {"tokenizer_class": "Qwen2Tokenizer"},
        {"tokenizer_class": "GPT2TokenizerFast"},
        {"tokenizer_class": "LlamaTokenizerFast"},
        {"split_special_tokens": True},
        {"added_tokens_decoder": {"1023": {"content": "zzz", "special": True, "lstrip": True}}},
        {"extra_special_tokens": ["<extra>"], "unk_token": "<extra>"},
        {
            "chat_template": [
                {"name": "default", "template": "d"},
                {"name": "tool_use", "template": "t"},
            ]
        },
        {"model_max_length": 3},
    ],
)
def test_it_does_what_transformers_does(directory: Path, config: dict[str, Any]) -> None:
    change(directory / "tokenizer_config.json", **config)
    if "chat_template" in config:
        (directory / "chat_template.jinja").unlink()
    checkpoint = open_checkpoint(str(directory))
    full: Any = load_tokenizer(checkpoint)
    serving_tokenizer(checkpoint)
    kept: Any = read_kept(checkpoint)
    assert isinstance(kept, KeptTokenizer)
    for name in ("eos_token_id", "special_tokens_map", "all_special_ids", "chat_template"):
        assert getattr(kept, name) == getattr(full, name)
    assert kept.get_vocab() == full.get_vocab()
    assert kept.added_tokens_decoder.keys() == full.added_tokens_decoder.keys()
    for options in ((), ("d",), (None, []), (None, None)):
        assert kept.get_chat_template(*options) == full.get_chat_template(*options)

    @given(TEXTS, st.booleans())
    @settings(max_examples=30, deadline=None)
    def same(text: str, flag: bool) -> None:
        ids = kept.encode(text, add_special_tokens=flag)
        assert ids == full.encode(text, add_special_tokens=flag)
        text = kept.decode(ids, skip_special_tokens=flag)
        assert text == full.decode(ids, skip_special_tokens=flag)
        assert kept.convert_ids_to_tokens(ids) == full.convert_ids_to_tokens(ids)

    same()


def test_a_second_start_does_not_import_transformers(directory: Path) -> None:
    """Symptom: 0.8 s of each start."""
    code = f"""
import sys
from nanovllm import LLM, SamplingParams
options = dict(max_model_len=64, kv_cache_memory_bytes=2**26)
llm = LLM({str(directory)!r}, native_kernels=False, **options)  # the cache has no kernels
llm.generate("What is a KV cache?", SamplingParams(max_tokens=2), use_tqdm=False)
print("transformers" in sys.modules)
"""
    command = [sys.executable, "-c", code]
    serving_tokenizer(open_checkpoint(str(directory)))  # the first start
    assert subprocess.run(command, capture_output=True, text=True).stdout == "False\n"


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "added_tokens.json"])
def test_it_is_made_again_when_a_file_changes(directory: Path, name: str) -> None:
    checkpoint = open_checkpoint(str(directory))
    serving_tokenizer(checkpoint)
    file = directory / name
    change(file, **({} if file.exists() else {"<new>": 1023}))
    file.write_text(file.read_text() + "\n")
    assert read_kept(checkpoint) is None


def test_a_model_type_of_its_own_is_another_tokenizer(directory: Path) -> None:
    serving_tokenizer(open_checkpoint(str(directory)))
    change(directory / "config.json", model_type="other")
    assert read_kept(open_checkpoint(str(directory))) is None


def test_another_version_of_transformers_makes_it_again(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = open_checkpoint(str(directory))
    serving_tokenizer(checkpoint)
    monkeypatch.setattr(kept_tokenizer, "version", lambda name: "0.0.0")
    assert read_kept(checkpoint) is None


@pytest.mark.parametrize("damage", [b"", b"{}", b'{"backend": 5}'])
def test_a_damaged_file_is_made_again(directory: Path, damage: bytes) -> None:
    checkpoint = open_checkpoint(str(directory))
    serving_tokenizer(checkpoint)
    (file,) = kept_files()
    whole = file.read_bytes()
    file.write_bytes(damage)
    if damage:
        kept_tokenizer.disk_cache.seal(file)  # as if another program had written it
    assert read_kept(checkpoint) is None
    found = serving_tokenizer(checkpoint)
    assert found is not None
    assert found.encode("a") == load_tokenizer(checkpoint).encode("a")  # type: ignore[union-attr]
    assert file.read_bytes() == whole


def test_it_works_without_a_place_to_keep_it(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc")
    assert serving_tokenizer(open_checkpoint(str(directory))) is not None


def test_the_last_ones_used_are_kept(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_tokenizer, "_MAX_KEPT", 2)
    checkpoint = open_checkpoint(str(directory))
    fields = fields_of(load_tokenizer(checkpoint))  # type: ignore[arg-type]
    monkeypatch.setattr(tokenizer, "load_tokenizer", lambda _: pytest.fail("made again"))
    for age, model_type in enumerate(["first", "second", "third"]):
        change(directory / "config.json", model_type=model_type)
        kept_tokenizer.keep(open_checkpoint(str(directory)), fields)
        for file in kept_files():
            if file.stat().st_mtime > age:  # the one just kept
                os.utime(file, (age, age))
        if model_type == "second":  # the first is used again
            change(directory / "config.json", model_type="first")
            assert read_kept(open_checkpoint(str(directory))) is not None
    change(directory / "config.json", model_type="second")
    assert read_kept(open_checkpoint(str(directory))) is None
    assert len(kept_files()) == 2
