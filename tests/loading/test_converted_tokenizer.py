"""Where there is no tokenizer.json: GGUF files, whose tokenizer is kept on disk, and Kimi's."""

import base64
import itertools
import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from nanovllm import demo_model
from nanovllm.errors import CheckpointError
from nanovllm.loading import converted_tokenizer
from nanovllm.loading.hub import Checkpoint, open_checkpoint
from nanovllm.loading.text_tokenizer import TextTokenizer
from nanovllm.loading.tokenizer import serving_tokenizer
from tests.gguf_files import make_gguf

TEXTS = ["", "hello  wörld\n", "<|im_start|>user\nhe<|im_end|>", "né 🦊\u200d", " a  b\t\n"]
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "nanovllm"


@pytest.fixture
def file(tmp_path: Path) -> str:
    return make_gguf(tmp_path / "gguf", "llama", metadata={}, tokens=SPECIAL)[0]


def read(path: Path | str) -> TextTokenizer:
    checkpoint = open_checkpoint(path) if isinstance(path, str) else Checkpoint(path, {}, {}, path)
    found = serving_tokenizer(checkpoint)
    assert found is not None
    return found


def test_what_was_kept_does_the_same(file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = read(file)
    fail: Any = lambda *_: pytest.fail("made again")  # noqa: E731
    monkeypatch.setattr(converted_tokenizer, "convert_gguf_tokenizer", fail)
    kept = read(file)
    assert kept.eos_token_id == made.eos_token_id is not None
    assert kept.special_tokens_map == made.special_tokens_map
    assert kept.chat_template == made.chat_template is not None
    assert kept.get_vocab() == made.get_vocab()
    assert kept.added_tokens_decoder.keys() == made.added_tokens_decoder.keys()
    for text in TEXTS:
        ids = kept.encode(text)
        assert ids == made.encode(text)
        assert kept.decode(ids) == made.decode(ids) == text
        assert kept.decode(ids, skip_special_tokens=True) == made.decode(ids, True)


def test_a_start_does_not_import_slow_libraries(cache: Path) -> None:
    """Symptom: transformers took 0.8 s of each start."""
    code = f"""
import sys
from nanovllm import LLM, SamplingParams
options = dict(max_model_len=64, kv_cache_memory_bytes=2**26)
llm = LLM({str(demo_model.MODEL)!r}, native_kernels=False, **options)  # the cache has no kernels
llm.generate("What is a KV cache?", SamplingParams(max_tokens=2), use_tqdm=False)
print(sorted({{"transformers", "huggingface_hub"}} & {{*sys.modules}}))
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert found.stdout == "[]\n", found.stderr
    assert not [*cache.glob("tokenizer-*.json")]


def test_another_version_makes_it_again(
    file: str, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of transformers, or of this package: what is kept is not what it would make today."""
    read(file)
    with monkeypatch.context() as patch:
        patch.setattr(converted_tokenizer, "version", lambda name: "0.0.0")
        read(file)
    monkeypatch.setattr(converted_tokenizer, "_FORMAT", 10**6)
    read(file)
    assert len([*cache.glob("tokenizer-*.json")]) == 3


@pytest.mark.parametrize("damage", [b"", b"{}", b'{"backend": 5}'])
def test_a_damaged_file_is_made_again(file: str, cache: Path, damage: bytes) -> None:
    expected = read(file).encode("hello")
    (kept,) = cache.glob("tokenizer-*.json")
    whole = kept.read_bytes()
    kept.write_bytes(damage)
    if damage:
        converted_tokenizer.disk_cache.seal(kept)  # as if another program had written it
    assert read(file).encode("hello") == expected
    assert kept.read_bytes() == whole


def test_it_works_without_a_place_to_keep_it(file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc")
    assert read(file).encode("he")


def test_the_last_ones_used_are_kept(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(converted_tokenizer, "_MAX_KEPT", 2)
    files = {}
    for age, name in enumerate("abc"):
        model = make_gguf(tmp_path / name, "llama", metadata={}, tokens=[*SPECIAL, name * 2])[0]
        before = {*cache.glob("tokenizer-*.json")}
        read(model)
        (files[model],) = {*cache.glob("tokenizer-*.json")} - before
        os.utime(files[model], (age, age))
        if name == "b":  # the first is used again
            read(next(iter(files)))
    assert [kept.exists() for kept in files.values()] == [True, False, True]


PIECES = (
    *("你好", "world", "漢字", "ABcd", " don't", " I'M", " ", "123", "45", ",", " x", "字"),
    *("é\u0301", " -->\r\n", "\n\n", "  ", " _", " 你好", "한국", "カナ", "\t", "Ａb"),
)
"""What Kimi's pattern makes of the first 13 in a row, and of each alone but " 你好"."""


@pytest.fixture
def kimi(tmp_path: Path) -> Path:
    """A tiktoken.model with a few tokens, and what tokenizer_config.json says beside it."""
    words = ["ab", "ba", "aba", "bab", "abab", "aa", "aaa", "do", "on", "don", "'m", "'s", "12"]
    words += ["wo", "or", "ld", "23", "123", "你好", "你", "漢", "  ", "\n\n", "\r\n", "好w", "5,"]
    tokens = [bytes([byte]) for byte in range(256)] + [word.encode() for word in words]
    lines = [f"{base64.b64encode(token).decode()} {rank}" for rank, token in enumerate(tokens)]
    (tmp_path / "tiktoken.model").write_text("\n".join(lines) + "\n")
    first = len(tokens)
    added = {
        str(first): {"content": "[BOS]", "special": True},
        str(first + 2): {"content": "<|im_end|>", "special": True},
        str(first + 3): {"content": "<|tool_call_begin|>", "special": False},
    }
    code = {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]}
    config = {"auto_map": code, "added_tokens_decoder": added, "eos_token": "<|im_end|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    return tmp_path


def merged(piece: str, ranks: dict[bytes, int]) -> list[int]:
    """Return a piece's tokens: the first two neighbours merge that make the lowest one there is."""
    parts = [bytes([byte]) for byte in piece.encode()]
    while piece.encode() not in ranks:
        made = [first + second for first, second in itertools.pairwise(parts)]
        known = [token for token in made if token in ranks]
        if not known:
            break
        place = made.index(min(known, key=ranks.__getitem__))
        parts[place : place + 2] = [made[place]]
    return [ranks[part] for part in ([piece.encode()] if piece.encode() in ranks else parts)]


def test_kimi_has_a_file_of_ranks(kimi: Path) -> None:
    """Beside tiktoken's algorithm. The pattern was compared with tiktoken's own on 3,000 texts."""
    rows = [line.split() for line in (kimi / "tiktoken.model").read_bytes().splitlines()]
    ranks = {base64.b64decode(token): int(rank) for token, rank in rows}
    rng = random.Random(0)
    pieces = [*PIECES, *("".join(rng.choices("ab", k=rng.randrange(1, 20))) for _ in range(99))]
    found = read(kimi)
    for piece in pieces:
        parts = [" ", "你好"] if piece == " 你好" else [piece]
        assert found.encode(piece) == [i for part in parts for i in merged(part, ranks)], piece
    text = "".join(PIECES[:13])
    assert found.encode(text) == [i for piece in PIECES[:13] for i in merged(piece, ranks)]
    assert found.decode(found.encode(text)) == text
    marked = "[BOS]a<|im_end|><|tool_call_begin|>"
    first = len(ranks)
    assert found.encode(marked) == [first, 97, first + 2, first + 3]
    assert found.decode(found.encode(marked), True) == "a<|tool_call_begin|>"
    assert found.eos_token_id == first + 2
    reserved = f"<|reserved_token_{first + 255}|>"
    assert found.encode(reserved) == [first + 255]
    assert len(found.get_vocab()) == first + 256


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("YQ== 0\nYg== 2\n", "must have the ranks 0, 1, 2 and so on"),
        ("YQ== 0\nYQ== 1\n", "must have the ranks"),
        ("", "must have the ranks"),
        ("YQ== x\n", "cannot read .*tiktoken.model"),
        ("*** 0\n", "cannot read .*tiktoken.model"),
        (f"{base64.b64encode(b'a' * 2000).decode()} 0", "a token has 2000 bytes; 1024 are"),
    ],
)
def test_a_wrong_file_of_ranks_is_refused(kimi: Path, content: str, said: str) -> None:
    (kimi / "tiktoken.model").write_text(content)
    with pytest.raises(CheckpointError, match=said):
        read(kimi)


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"tekken.json": {}, "tokenizer.model": "x"}, "tokenizer.model, tekken.json: take"),
        ({"tokenizer.model": "x", "tokenizer_config.json": {}}, "tokenizer.model: take"),
        (
            {"tiktoken.model": "YQ== 0", "tokenizer_config.json": {"auto_map": {"a": 1}}},
            "tiktoken.model, and the code that comes with it is not tokenization_kimi.TikToken",
        ),
        ({"tokenizer_config.json": {}, "vocab.json": {}}, "tokenizer_config.json: take"),
    ],
)
def test_other_files_are_named_and_refused(
    tmp_path: Path, files: dict[str, Any], said: str
) -> None:
    (tmp_path / "config.json").write_text('{"vocab_size": 10}')
    for name, content in files.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (tmp_path / name).write_text(text)
    with pytest.raises(CheckpointError, match=f"has no tokenizer.json, only .*{said}") as raised:
        read(str(tmp_path))
    assert "AutoTokenizer.from_pretrained" in str(raised.value)


def test_a_pointer_in_place_of_the_file_of_ranks(kimi: Path) -> None:
    (kimi / "tiktoken.model").write_text("version https://git-lfs.github.com/spec/v1\noid")
    with pytest.raises(CheckpointError, match="`git lfs pull`"):
        read(kimi)
