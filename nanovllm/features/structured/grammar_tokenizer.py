"""The tokenizer that grammars are compiled for: no text contains a mark such as <|im_end|>.

Text that looks like a mark then consists of ordinary tokens, and a grammar can name a mark only by
its id.
"""

import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

_MARK = re.compile(r"(?s:<.*>|\[.*\])")
"""Texts of added tokens that mark something, special tokens aside. Others, such as runs of spaces,
are text."""
_LARK_PARTS = re.compile(
    r"""(?sx)
    "(?:\\.|[^"\\])*+"?         # a string, in JSON too
    | (?:\#|//)[^\n]*           # a comment
    | /(?:\\.|[^/\\])++/?       # a regular expression
    | <[^<>\s]+>                # a token
    """
)


class GrammarTokenizer(NamedTuple):
    """What grammars have to know of a tokenizer."""

    text: str  # its tokenizer.json, with marks that no text matches. Ids are unchanged.
    mark_ids: dict[str, int]  # the ids of the marks by their texts
    drops_space: bool  # whether decoding drops a space at the start of an output, as for Llama 2

    def with_mark_ids(self, grammar: str) -> str:
        """Return a grammar in Lark's notation that has marks by their ids: <[5]> for <think>."""

        def replaced(match: re.Match[str]) -> str:
            token = self.mark_ids.get(match[0])
            return match[0] if token is None else f"<[{token}]>"

        return _LARK_PARTS.sub(replaced, grammar)


def grammar_tokenizer(text: str) -> GrammarTokenizer:
    """Return what grammars have to know of a tokenizer.json."""
    settings = json.loads(text)
    renamed: dict[str, str] = {}
    mark_ids: dict[str, int] = {}
    for token in settings.get("added_tokens") or ():
        content = token["content"]
        if token["special"] or _MARK.fullmatch(content):
            mark_ids[content] = token["id"]
            # U+FDD0 is not a character: no text meant for interchange has one.
            renamed[content] = f"\ufdd0{token['id']}\ufdd0"
            no_match = {"lstrip": False, "rstrip": False, "normalized": False}
            token.update(no_match, content=renamed[content], special=True)
    _rename(settings["model"], renamed)
    return GrammarTokenizer(json.dumps(settings), mark_ids, _drops_space(settings.get("decoder")))


def _rename(model: dict[str, Any], renamed: Mapping[str, str]) -> None:
    """Rename tokens of a vocabulary, and take away the merges that would make them."""
    vocab = model.get("vocab")
    if isinstance(vocab, dict):
        found = [name for name in renamed if name in vocab]
        for name in found:
            vocab[renamed[name]] = vocab.pop(name)
    else:  # a list of [token, score]
        vocab = vocab or []
        found = [entry[0] for entry in vocab if entry[0] in renamed]
        for entry in vocab:
            entry[0] = renamed.get(entry[0], entry[0])
    if found and model.get("merges"):
        model["merges"] = [merge for merge in model["merges"] if not _makes(merge, renamed)]
    if model.get("unk_token") in renamed:
        model["unk_token"] = renamed[model["unk_token"]]


def _makes(merge: Any, renamed: Mapping[str, str]) -> bool:
    """Whether a merge has one of these tokens as a part or as its result."""
    left, right = merge.split(" ") if isinstance(merge, str) else merge
    return left in renamed or right in renamed or left + right in renamed


def _drops_space(decoder: Any) -> bool:
    steps = (decoder or {}).get("decoders", [decoder or {}])
    return any(
        (step["type"] == "Strip" and step["content"] == " " and step["start"] > 0)
        or (step["type"] == "Metaspace" and step.get("prepend_scheme", "always") != "never")
        for step in steps
        if step
    )
