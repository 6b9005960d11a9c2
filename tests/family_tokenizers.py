"""A small tokenizer.json in the shape of each documented family's, and the classes they name.

The patterns are those of the published files, which hold nothing else that decides how text is
split. Vocabularies are trained on a few sentences.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from nanovllm.loading.converted_tokenizer import KIMI_PATTERN as KIMI

CORPUS = [
    "In 2023 and 650841823, they're HERE.",
    "a\n\nb\n\n\nc  \n  d",
    "f(x) (foo) [bar] = {'a': 1};",
    "नमस्ते दुनिया",
    "สวัสดีครับ ขอบคุณ",
    "مرحبا بالعالم",
    "日本語 你好 한국어",
    "été e\u0301te\u0301 👋",
] * 20
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>"]
PIECES = ["<unk>", "<s>", "</s>", "<|user|>", "<|end|>", "[INST]"]

_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS, _MARKS = r"[^\r\n\p{L}\p{N}]?\p{L}+", r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+"
_SIGNS, _NO_MARKS = r" ?[^\s\p{L}\p{N}]+[\r\n]*", r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASES = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
LLAMA3 = rf"{_CONTRACTION}|{_WORDS}|\p{{N}}{{1,3}}|{_SIGNS}|{_SPACES}"
QWEN2 = rf"{_CONTRACTION}|{_WORDS}|\p{{N}}|{_SIGNS}|{_SPACES}"
QWEN3_5 = rf"{_CONTRACTION}|{_MARKS}|\p{{N}}|{_NO_MARKS}|{_SPACES}"
O200K = rf"{_CASES}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
TEKKEN = rf"{_CASES}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
_ASCII = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"""
_NAMES = r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
_MARKED = rf"{_ASCII}|{_NAMES}|{_SPACES}"
DEEPSEEK_2 = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-\ud7ff]+", r"\p{N}")
DEEPSEEK_3 = (r"\p{N}{1,3}", r"[一-龥぀-ゟ゠-ヿ]+", _MARKED)
AFMOE = (r"\p{N}{1,3}(?=(?:\p{N}{3})*\b)", r"[一-鿿㐀-䶿぀-ゟ゠-ヿเ-๿가-힯]+", _MARKED)
BAILING = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*"
    r"|\s*[\r\n]|\s+(?!\S)|\s+"
)
LAGUNA = (r"[^\n]+|[\n]+", QWEN2)


def _trained(tokenizer: Tokenizer) -> Tokenizer:
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=SPECIAL[:1],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in SPECIAL[:3]])
    tokenizer.add_tokens([AddedToken(SPECIAL[3], normalized=False)])  # not special: it is shown
    return tokenizer


def byte_level(
    *patterns: str, nfc: bool = False, digits: bool = False, bos: bool = False, whole: bool = False
) -> Tokenizer:
    """Return byte-level BPE; without `patterns`, text is split as by GPT-2."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=whole))
    if nfc:
        tokenizer.normalizer = normalizers.NFC()
    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if digits else []
    steps += [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not patterns))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    tokenizer = _trained(tokenizer)
    if bos:
        first = processors.TemplateProcessing(
            single=f"{SPECIAL[0]} $A", special_tokens=[(SPECIAL[0], 0)]
        )
        tokenizer.post_processor = processors.Sequence([tokenizer.post_processor, first])
    return tokenizer


def pieces(shape: str, *, bos: bool = True, rstrip: bool = False) -> Tokenizer:
    """Return SentencePiece's BPE as files have it.

    Args:
        shape: "prepend": a space comes first, by a normalizer; "first": by a pre-tokenizer, and
            only at the start of a text; "gemma": none comes first.
        rstrip: marks of a turn take the spaces behind them.
    """
    letters = [*"▁aehlorwdxtsn()ct.,\n0123456789", "é"]
    merges = [("▁", "▁"), ("▁", "h"), ("h", "e"), ("l", "l"), ("he", "ll"), ("▁", "a")]
    words = [first + second for first, second in merges]
    tokens = [*PIECES, *(f"<0x{byte:02X}>" for byte in range(256)), *letters, *words]
    vocab = {token: index for index, token in enumerate(dict.fromkeys(tokens))}
    options: dict[str, Any] = {"byte_fallback": True, "fuse_unk": True, "unk_token": "<unk>"}
    tokenizer = Tokenizer(models.BPE(vocab, merges, **options))
    end: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if shape == "prepend":
        tokenizer.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
    elif shape == "first":
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    else:
        tokenizer.normalizer = normalizers.Replace(" ", "▁")
        tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    tokenizer.decoder = decoders.Sequence(
        end if shape == "gemma" else [*end, decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(
        [AddedToken(text, normalized=False, rstrip=rstrip and text[1] == "|") for text in PIECES]
    )
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", 1)]
        )
    return tokenizer


class Family(NamedTuple):
    """The tokenizers that a family's checkpoints have, and the classes that their files name."""

    makers: tuple[Callable[[], Tokenizer], ...]
    classes: tuple[str, ...]


def _family(classes: str, *makers: Callable[[], Tokenizer]) -> Family:
    return Family(makers, tuple(classes.split()))


LLAMA_3 = functools.partial(byte_level, LLAMA3, bos=True, whole=True)
NFC = functools.partial(byte_level, nfc=True)
GPT_2 = functools.partial(byte_level, digits=True)
CL100K = functools.partial(byte_level, LLAMA3)
QWEN = functools.partial(byte_level, QWEN2, nfc=True)
MISTRAL = functools.partial(byte_level, TEKKEN, bos=True, whole=True)
LLAMA_2 = functools.partial(pieces, "prepend")
LLAMA_2_NEW = functools.partial(pieces, "first")
GEMMA = functools.partial(pieces, "gemma")
_PLAIN = "PreTrainedTokenizerFast TokenizersBackend PreTrainedTokenizer"
_LLAMA = "LlamaTokenizer LlamaTokenizerFast"
_QWEN = "Qwen2Tokenizer Qwen2TokenizerFast"
_GPT_2 = "GPT2Tokenizer GPT2TokenizerFast"
_COHERE = "CohereTokenizer CohereTokenizerFast TokenizersBackend"
_KIMI = "TikTokenTokenizer TokenizersBackend"
FAMILIES = {
    "afmoe": _family(_PLAIN, functools.partial(byte_level, *AFMOE)),
    "bailing_hybrid": _family(_PLAIN, functools.partial(byte_level, BAILING)),
    "bamba": _family(_PLAIN, LLAMA_3),
    "cohere": _family(_COHERE, functools.partial(byte_level, digits=True, nfc=True, bos=True)),
    "deepseek": _family(
        _LLAMA,
        functools.partial(byte_level, *DEEPSEEK_2, bos=True),
        functools.partial(byte_level, *DEEPSEEK_3, bos=True),
    ),
    "ernie4_5": _family(f"{_LLAMA} Ernie4_5Tokenizer", GEMMA, LLAMA_2),
    "exaone4": _family(_GPT_2, functools.partial(byte_level, O200K)),
    "falcon_h1": _family(_PLAIN, functools.partial(byte_level, LLAMA3, whole=True)),
    "gemma": _family("GemmaTokenizer GemmaTokenizerFast", GEMMA),
    "gemma4": _family("GemmaTokenizer", functools.partial(pieces, "gemma", bos=False)),
    "glm4_moe": _family(_PLAIN, CL100K),
    "gpt": _family(f"{_GPT_2} GPTNeoXTokenizer GPTNeoXTokenizerFast", byte_level, NFC),
    "gpt_oss": _family(_PLAIN, functools.partial(byte_level, O200K)),
    "granite": _family(_GPT_2, GPT_2, CL100K),
    "kimi_linear": _family(_KIMI, functools.partial(byte_level, KIMI, whole=True)),
    "laguna": _family(_PLAIN, functools.partial(byte_level, *LAGUNA)),
    "lfm": _family(_PLAIN, LLAMA_3),
    "llama": _family(
        f"{_PLAIN} {_LLAMA} GPT2Tokenizer CodeLlamaTokenizer CodeLlamaTokenizerFast HYTokenizer",
        LLAMA_3,
        LLAMA_2,
        LLAMA_2_NEW,
        GPT_2,
        functools.partial(byte_level, r"\p{N}{1,3}", r"[一-龥぀-ゟ゠-ヿ]+", QWEN3_5, bos=True),
        functools.partial(byte_level, r"\p{N}{1,3}", QWEN2),
        functools.partial(byte_level, QWEN2),
        functools.partial(byte_level, LLAMA3, whole=True),
    ),
    "minicpm3": _family(f"{_LLAMA} MiniCPM3Tokenizer", LLAMA_2),
    "minimax_m2": _family(_GPT_2, functools.partial(byte_level, O200K)),
    "mistral": _family(
        f"{_PLAIN} {_LLAMA} MistralCommonBackend GPT2Tokenizer", LLAMA_2, LLAMA_2_NEW, MISTRAL
    ),
    "muse_glimmer": _family(_PLAIN, functools.partial(byte_level, O200K, bos=True)),
    "nemotron_h": _family(_PLAIN, MISTRAL),
    "olmo": _family(_GPT_2, CL100K),
    "phi3": _family(
        f"{_LLAMA} {_GPT_2}",
        functools.partial(pieces, "prepend", bos=False, rstrip=True),
        CL100K,
        functools.partial(byte_level, O200K),
    ),
    "qwen2": _family(_QWEN, QWEN),
    "qwen3": _family(_QWEN, QWEN),
    "qwen3_5": _family(
        f"{_QWEN} Qwen3_5Tokenizer TokenizersBackend",
        QWEN,
        functools.partial(byte_level, QWEN3_5, nfc=True),
    ),
    "qwen3_moe": _family(f"{_QWEN} {_PLAIN} {_GPT_2}", QWEN, GPT_2),
    "qwen3_vl": _family(_QWEN, QWEN),
}
"""By the file of the family."""
