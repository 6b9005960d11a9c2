"""Reads Kimi's tiktoken.model: byte-level BPE whose merges are ranks of tokens.

How text is split before, and which tokens there are besides, stands in Python code that comes with
the file and is not run. Kimi's is known, so it is here.
"""

import base64
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from nanovllm.errors import CheckpointError
from nanovllm.loading.text_tokenizer import TextTokenizer, byte_level_chars
from nanovllm.loading.tokenizer_files import with_settings
from nanovllm.options.validation import shown

TIKTOKEN_MODEL = "tiktoken.model"
KIMI_CLASS = "tokenization_kimi.TikTokenTokenizer"
_NUM_CONTROL = 256
"""Tokens after those of the file: those that tokenizer_config.json lists, and reserved ones."""
_LONGEST = 1024
"""Bytes of a token; the number of its merges grows with them."""
_CONTRACTION = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
PATTERN = "|".join(
    (
        r"[\p{Han}]+",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTION}",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTION}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
"""What Kimi's text is split into; Chinese characters stand apart from other letters."""


def is_kimi(settings: Mapping[str, Any]) -> bool:
    """Whether tokenizer_config.json names Kimi's code."""
    found = settings.get("auto_map")
    names = found.get("AutoTokenizer") if isinstance(found, Mapping) else None
    names = names if isinstance(names, list) else [names]
    return any(isinstance(n, str) and n.rpartition("--")[2] == KIMI_CLASS for n in names)


def read_tiktoken(path: Path, settings: Mapping[str, Any]) -> TextTokenizer:
    """Return the tokenizer of directory `path`, which has Kimi's tiktoken.model.

    Args:
        settings: tokenizer_config.json.

    Raises:
        CheckpointError: a file is invalid; it names the file.
    """
    ranks = _ranks(path / TIKTOKEN_MODEL)
    chars = byte_level_chars()
    text_of = {token: "".join(chars[byte] for byte in token) for token in ranks}
    vocab = {text_of[token]: rank for token, rank in ranks.items()}
    merges = [(text_of[first], text_of[second]) for first, second in _merges(ranks)]
    backend = Tokenizer(models.BPE(vocab, merges, ignore_merges=True))
    split = pre_tokenizers.Split(Regex(PATTERN), "isolated")
    whole = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, whole])
    backend.decoder = decoders.ByteLevel()
    listed = settings.get("added_tokens_decoder") or {}
    for token_id in range(len(ranks), len(ranks) + _NUM_CONTROL):
        given = listed.get(str(token_id), {"content": f"<|reserved_token_{token_id}|>"})
        if backend.token_to_id(given["content"]) is not None:
            raise CheckpointError(
                f"{path / 'tokenizer_config.json'}: token {token_id}, {shown(given['content'])}, "
                f"is also token {backend.token_to_id(given['content'])}"
            )
        is_special = bool(given.get("special", True))
        token = AddedToken(given["content"], normalized=False, special=is_special)
        backend.add_tokens([token])
    return with_settings(path, backend)


def _ranks(file: Path) -> dict[bytes, int]:
    """Return the ranks of a file's tokens, which are their ids: 0, 1, 2 and so on."""
    ranks: dict[bytes, int] = {}
    try:
        for line in file.read_bytes().splitlines():
            if line:
                token, rank = line.split()
                ranks[base64.b64decode(token, validate=True)] = int(rank)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot read {file}: {error!s:.200}") from error
    if list(ranks.values()) != list(range(len(ranks))) or not ranks:
        raise CheckpointError(f"{file}: its tokens must have the ranks 0, 1, 2 and so on")
    if (longest := max(map(len, ranks))) > _LONGEST:
        raise CheckpointError(
            f"{file}: a token has {longest} bytes; {_LONGEST} are the most that is read"
        )
    return ranks


def _merges(ranks: Mapping[bytes, int]) -> list[tuple[bytes, bytes]]:
    """Return what may be merged, in the order in which it is: any two tokens that make another.

    In tiktoken the two neighbours merge that make the token of the lowest rank.
    """
    merges = []
    for token in ranks:  # in the order of their ranks
        pairs = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        known = [(first, second) for first, second in pairs if first in ranks and second in ranks]
        merges += sorted(known, key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
    return merges
