"""The tokenizer in a GGUF file: text, special tokens, the chat template, ends of a text."""

import pytest
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoConfig

from nanovllm import SamplingParams
from nanovllm.errors import CheckpointError, UnsupportedModelError
from nanovllm.loading.hub import open_checkpoint
from nanovllm.loading.tokenizer import load_tokenizer, serving_tokenizer, token_bound
from tests.checkpoints import random_model
from tests.gguf_converter import convert
from tests.gguf_files import SIZES, make_gguf

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|eot_id|>", "<s>"]


def make_file(path, tokens=SPECIAL, **metadata):
    named = {f"tokenizer.{key}": value for key, value in metadata.items()}
    return make_gguf(path, "llama", metadata={}, tokens=tokens, tokenizer=named)[0]


def tokenizer_of(path, **metadata):
    return load_tokenizer(open_checkpoint(make_file(path, **metadata)))


def test_text_and_special_tokens(tmp_path):
    tokenizer = tokenizer_of(tmp_path)
    text = "hello wörld  12 <|im_end|>\n"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert 2 in ids
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("he 12")) == ["he", "Ġ", "1", "2"]
    assert token_bound(serving_tokenizer(open_checkpoint(make_file(tmp_path / "a")))) is not None


def test_special_tokens_of_any_characters(tmp_path):
    """DeepSeek's have wide bars; GPT-NeoX has runs of spaces, which are its user's."""
    special = ["<｜begin▁of▁sentence｜>", "<｜User｜>", "  ", "<｜tool▁call｜>"]
    metadata = {"ggml.bos_token_id": 0, "ggml.add_bos_token": True, "ggml.eos_token_id": 1}
    words = [*sorted(ByteLevel.alphabet()), "he", "ll", "中"]
    metadata["ggml.tokens"] = [*special, *words]
    metadata["ggml.token_type"] = [3, 3, 4, 4, *[1] * len(words)]
    tokenizer = tokenizer_of(tmp_path, **metadata)
    text = "<｜User｜>he  he<｜tool▁call｜>中"
    ids = tokenizer.encode(text)
    assert [token for token in ids if token < 4] == [0, 1, 2, 3]
    assert max(ids) < len(special) + len(words)
    assert tokenizer.decode(ids) == special[0] + text
    assert tokenizer.decode(ids, skip_special_tokens=True) == text.removeprefix("<｜User｜>")


@pytest.mark.parametrize(("add", "first"), [(True, 4), (False, None), (None, None)])
def test_add_bos_token(tmp_path, add, first):
    metadata = {"ggml.bos_token_id": 4}
    if add is not None:
        metadata["ggml.add_bos_token"] = add
    ids = tokenizer_of(tmp_path, **metadata).encode("h")
    assert ids[:-1] == ([] if first is None else [first])


def test_llama_3_adds_a_bos_token(tmp_path):
    """As llama.cpp does for this pre-tokenizer, where the file does not say otherwise."""
    metadata = {"ggml.bos_token_id": 4, "ggml.pre": "llama-bpe"}
    tokenizer = tokenizer_of(tmp_path / "a", **metadata)
    assert tokenizer.encode("h")[0] == 4
    assert tokenizer.backend_tokenizer.model.ignore_merges
    tokenizer = tokenizer_of(tmp_path / "b", **metadata, **{"ggml.add_bos_token": False})
    assert len(tokenizer.encode("h")) == 1


@pytest.mark.parametrize("prefix", [None, True, False])
def test_sentencepiece(tmp_path, prefix):
    """Its merges follow from the scores; a BOS token and a space come first unless denied."""
    words = ["▁", "h", "e", "he", "▁he", "l", "o"]
    metadata = {
        "ggml.model": "llama",
        "ggml.tokens": ["<unk>", "<s>", "</s>", "<0x0A>", "<0xC3>", "<0xB6>", *words],
        "ggml.token_type": [2, 3, 3, 6, 6, 6] + [1] * len(words),
        "ggml.scores": [0.0] * 6 + [-1.0, -2.0, -3.0, -4.0, -5.0, -6.0, -7.0],
        "ggml.merges": None,
        "ggml.bos_token_id": 1,
        "ggml.eos_token_id": 2,
    }
    if prefix is not None:
        metadata["ggml.add_space_prefix"] = prefix
    tokenizer = tokenizer_of(tmp_path, **metadata)
    ids = tokenizer.encode("hello ö\n")
    start = ["<s>", "he" if prefix is False else "▁he"]
    assert tokenizer.convert_ids_to_tokens(ids)[:5] == [*start, "l", "l", "o"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "hello ö\n"


def test_an_unknown_pre_tokenizer_is_named(tmp_path, caplog):
    tokenizer_of(tmp_path, **{"ggml.pre": "klingon"})
    assert "tokenizer.ggml.pre 'klingon' is unknown" in caplog.text


@pytest.mark.parametrize(
    ("tokens", "metadata", "expected"),
    [
        (SPECIAL, {}, {0, 2, 3, 7}),
        (["<|im_end|>", "x"], {}, {0, 7}),
        (["a", "b"], {"ggml.eot_token_id": 1}, {1, 7}),
        (["a", "b"], {"ggml.eom_token_id": 0}, {0, 7}),
        (["a"] * 306 + ["b", "<|im_end|>"], {}, {7}),  # beyond the model's vocabulary
    ],
)
def test_end_of_sequence_ids(tmp_path, tokens, metadata, expected):
    file = make_file(tmp_path, tokens, **metadata)
    assert open_checkpoint(file).eos_token_ids == expected


def test_chat(make_llm, tmp_path):
    llm = make_llm(make_file(tmp_path), max_model_len=64, num_kvcache_blocks=32)
    (output,) = llm.chat(
        [{"role": "user", "content": "he"}],
        SamplingParams(max_tokens=2, temperature=0),
        use_tqdm=False,
    )
    tokenizer = llm.get_tokenizer()
    assert output.prompt_token_ids == tokenizer.encode("he<|im_end|>")


def test_another_tokenizer_than_the_files(make_llm, tmp_path):
    from nanovllm import demo_model

    llm = make_llm(
        make_file(tmp_path),
        tokenizer=str(demo_model.MODEL),
        max_model_len=64,
        num_kvcache_blocks=32,
    )
    assert len(llm.get_tokenizer()) > 1000


@pytest.mark.parametrize(
    ("metadata", "said"),
    [
        (
            {"ggml.model": "bert"},
            r"tokenizer\.ggml\.model 'bert' is not supported \(gpt2, llama, gemma4\)",
        ),
        ({"ggml.merges": [1, 2]}, r"tokenizer\.ggml\.merges is not a list of str"),
        ({"ggml.merges": ["x"]}, "cannot load the tokenizer in .*its metadata is invalid"),
        ({"ggml.merges": ["no such"]}, "cannot load the tokenizer in .*its metadata is invalid"),
        ({"ggml.token_type": [1, 2]}, r"token_type has 2 elements for 263 tokens"),
        ({"ggml.bos_token_id": 10**6}, "cannot load the tokenizer in .*its metadata is invalid"),
        ({"chat_template": 5}, r"tokenizer\.chat_template must be a string"),
    ],
)
def test_a_tokenizer_that_makes_no_sense(tmp_path, metadata, said):
    with pytest.raises(CheckpointError, match=said):
        tokenizer_of(tmp_path, **metadata)


def test_more_special_tokens_than_transformers_adds_in_seconds(tmp_path):
    file = make_file(tmp_path, [f"<{index}>" for index in range(9000)])
    with pytest.raises(CheckpointError, match=r"9000 special tokens; at most 4194304 and 8192"):
        open_checkpoint(file)


def test_no_tokenizer_of_another_kind_is_needed_for_token_ids(tmp_path):
    checkpoint = open_checkpoint(make_file(tmp_path, **{"ggml.model": "bert"}))
    with pytest.raises(UnsupportedModelError):
        load_tokenizer(checkpoint)


@pytest.mark.parametrize(
    ("pre", "text", "expected"),
    [
        ("hunyuan-dense", "hello 1234", ["he", "ll", "o", "Ġ", "123", "4"]),
        ("seed-coder", "he12.\n", ["he", "1", "2", ".", "Ċ"]),
        ("exaone4", "he12", ["he", "12"]),
        ("tekken", "he12", ["<|endoftext|>", "he", "1", "2"]),
        ("gpt-4o", "he1234", ["he", "123", "4"]),
        ("smollm", "he12", ["he", "1", "2"]),
    ],
)
def test_how_pre_tokenizers_split(tmp_path, caplog, pre, text, expected):
    """The expected tokens are llama.cpp's for the same file."""
    merges = ["h e", "l l", "1 2", "12 3", "123 4", ". Ċ"]
    tokens = [*SPECIAL, *sorted(ByteLevel.alphabet()), *(m.replace(" ", "") for m in merges)]
    metadata = {
        "ggml.pre": pre,
        "ggml.merges": merges,
        "ggml.tokens": tokens,
        "ggml.token_type": [3] * len(SPECIAL) + [1] * (len(tokens) - len(SPECIAL)),
        "ggml.bos_token_id": 0,
    }
    tokenizer = tokenizer_of(tmp_path, **metadata)
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode(text)) == expected
    assert "is unknown" not in caplog.text


@pytest.mark.parametrize("model", ["llama", "gemma4"])
def test_gemma(tmp_path, model):
    """Spaces are a part of the tokens, none comes first; merges follow the vocabulary's order."""
    words = ["▁", "h", "e", "l", "o", "he", "ll", "▁he", "\n"]
    tokens = ["<pad>", "<eos>", "<bos>", "<unk>", "<end_of_turn>", "<0xC3>", "<0xB6>", *words, "  "]
    metadata = {
        "tokenizer.ggml.model": model,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3, 3, 3, 3, 3, 6, 6] + [1] * len(words) + [4],
        "tokenizer.ggml.scores": [-1000.0] * len(tokens),
        "tokenizer.ggml.bos_token_id": 2,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.add_space_prefix": False,
    }
    if model == "gemma4":
        metadata["tokenizer.ggml.merges"] = ["h e", "l l", "▁ he"]
    config = AutoConfig.for_model("gemma3_text", **SIZES, sliding_window=8)
    file = convert(random_model(config), tmp_path / "x.gguf", "gemma3", metadata=metadata)
    checkpoint = open_checkpoint(file)
    tokenizer = load_tokenizer(checkpoint)
    text = "hello hello  ö\n<end_of_turn>"
    ids = tokenizer.encode(text)
    found = tokenizer.convert_ids_to_tokens(ids)
    first = [] if model == "gemma4" else ["<bos>"]  # Gemma 4's template writes it
    assert found[: len(first) + 6] == [*first, "he", "ll", "o", "▁he", "ll", "o"]
    assert found[-2:] == ["\n", "<end_of_turn>"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == text.removesuffix("<end_of_turn>")
    assert checkpoint.eos_token_ids == {2, 4}


def test_the_end_of_a_message_is_no_end_of_turn(tmp_path):
    """gpt-oss's "<|end|>" ends a message; Phi's ends a turn."""
    harmony = ["<|return|>", "<|call|>", "<|end|>"]
    assert open_checkpoint(make_file(tmp_path / "a", harmony)).eos_token_ids == {0, 1, 7}
    assert open_checkpoint(make_file(tmp_path / "b", harmony[2:])).eos_token_ids == {0, 7}
