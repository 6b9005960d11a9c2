"""The tokenizer in a GGUF file: transformers converts it, and what it leaves out is added here.

Knows no prompts and no requests.
"""

import logging
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers

from nanovllm.checkpoint.gguf import read_gguf
from nanovllm.errors import UnsupportedModelError
from nanovllm.options.validation import shown

logger = logging.getLogger(__name__)

_MODELS = ("gpt2", "llama", "gemma4")
_SPLIT_LIKE_GPT2 = ("", "default", "gpt-2", "gpt2", "exaone4", "olmo")
_SINGLE_DIGITS = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b")
"""Pre-tokenizers that split off each digit and then split as GPT-2's does."""
_WORDS_FIRST = ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "tekken")
"""Pre-tokenizers whose words are looked up before they are merged, and that add a BOS token."""
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    r"[一-龥぀-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}",
)
_SPLITS = {
    "hunyuan": (
        rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*"
        rf"|{_SPACES}",
    ),
    "hunyuan-dense": _DEEPSEEK3,
    "deepseek-v3": _DEEPSEEK3,
    "seed-coder": (
        rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+"
        rf"|{_SPACES}",
    ),
}
"""Pre-tokenizers that transformers does not know: the patterns that split text, one after the
other, as in llama.cpp."""


def convert_gguf_tokenizer(file: Path) -> Any:
    """Return transformers' tokenizer made from GGUF `file`, with its chat template.

    Raises:
        UnsupportedModelError: the tokenizer is of another kind than byte-level BPE, SentencePiece's
            BPE and Gemma's.
        Exception: whatever transformers raises for contents that make no sense.
    """
    from transformers import PreTrainedTokenizerFast

    settings = read_gguf(file).tokenizer
    if settings.get("model") not in _MODELS:
        raise UnsupportedModelError(
            f"{file}: tokenizer.ggml.model {shown(settings.get('model'))} is not supported "
            f"({', '.join(_MODELS)}); give tokenizer"
        )
    with tempfile.TemporaryDirectory() as directory:  # transformers also reads a file's neighbours
        (Path(directory) / "model.gguf").symlink_to(file.absolute())
        tokenizer: Any = PreTrainedTokenizerFast.from_pretrained(directory, gguf_file="model.gguf")
    _complete(tokenizer, settings, file)
    return tokenizer


def _complete(tokenizer: Any, settings: Mapping[str, Any], file: Path) -> None:
    """Change `tokenizer` where transformers leaves out what the file says."""
    backend: Tokenizer = tokenizer.backend_tokenizer
    pre = settings.get("pre", "")
    before = str(backend.pre_tokenizer)
    if settings["model"] == "gemma4" or settings["architecture"] in ("gemma2", "gemma3"):
        return  # transformers has a class for them
    if settings["model"] == "llama":
        if not settings.get("add_space_prefix", True):
            backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
            backend.decoder = decoders.Sequence(
                [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
            )
    elif pre in _SINGLE_DIGITS:
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False),
            ]
        )
    elif pre in _SPLITS:
        splits = [pre_tokenizers.Split(Regex(split), "isolated") for split in _SPLITS[pre]]
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
    elif pre in _WORDS_FIRST:
        backend.model.ignore_merges = True
        if "add_bos_token" not in settings:
            tokenizer.add_bos_token = True
    elif pre not in _SPLIT_LIKE_GPT2 and "Split" not in before:
        logger.warning(
            "%s: tokenizer.ggml.pre %s is unknown: text is split as for GPT-2, so its tokens may "
            "differ from those that the model was trained on",
            file,
            shown(pre),
        )
