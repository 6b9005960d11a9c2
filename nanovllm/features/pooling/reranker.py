"""Rerankers: how a query and a document become one prompt, and its logits their score.

The built-in question is Qwen3-Reranker's (arXiv:2506.05176, and its model card).
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence as Seq
from typing import Any

from nanovllm.errors import InvalidRequestError, UnsupportedModelError
from nanovllm.features.pooling.texts import Texts

INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
"""What a document must do for its query, if a request does not say it."""
_BEGINNING = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and "
    'the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n"
)
_END = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"

Render = Callable[[list[dict[str, Any]], Mapping[str, Any]], str]
"""Returns the text of messages by the checkpoint's chat template, which gets these options."""
Write = Callable[[str, str, str | None], str]
"""Returns the text about a query and a document, with an instruction or without."""


def asked(query: str, document: str, instruction: str | None) -> str:
    """Return Qwen3-Reranker's question."""
    return (
        f"{_BEGINNING}<Instruct>: {instruction or INSTRUCTION}\n<Query>: {query}\n"
        f"<Document>: {document}{_END}"
    )


def templated(render: Render, options: Mapping[str, Any]) -> Write:
    """Return what writes a pair as sentence-transformers does: messages of the roles query and
    document, and the instruction as a system message.
    """

    def write(query: str, document: str, instruction: str | None) -> str:
        return render(messages(system=instruction or "", query=query, document=document), options)

    found = write("a query", "a document", None)
    if "a query" not in found or "a document" not in found:
        raise UnsupportedModelError(
            "the checkpoint's chat template leaves out messages of the roles query and document, "
            "with which its LogitScore asks: give it the template of a reranker"
        )
    return write


def messages(system: str, **texts: str) -> list[dict[str, Any]]:
    """Return messages by their roles, without that of the system if it is empty."""
    first = {"system": system} if system else {}
    return [{"role": role, "content": text} for role, text in {**first, **texts}.items()]


@dataclasses.dataclass(frozen=True)
class Reranker:
    """Scores pairs of texts."""

    texts: Texts
    token_ids: tuple[int, ...]
    """Whose logits after the prompt make the score: of no and yes, or of one token or label."""
    activation: str
    """What makes a score of a logit, "sigmoid" or "identity"."""
    write: Write | None
    """What writes a pair as one text; None: the tokenizer joins the two."""

    def prompt(
        self, query: str, document: str, instruction: str | None, kept: int | None, before: str
    ) -> list[int]:
        """Return the token ids of a pair.

        Args:
            before: the checkpoint's prompt: the instruction of a request without one or, where the
                tokenizer joins the two texts, what is written before the query.
            kept: how many tokens to keep at the beginning of the document; -1: as many as fit;
                None: to refuse a pair that is too long, unless the checkpoint cuts it.

        Raises:
            InvalidRequestError: the texts are too long, or there is an instruction that the model
                does not read.
        """
        texts = self.texts
        texts.most(kept)  # it may be too many
        if (write := self.write) is not None:
            instruction = instruction or before or None
            texts.limit.check_text("the query", instruction or "", query)
            if kept is not None and kept > 0:
                document = texts.beginning(document, kept)
            whole = None if kept != -1 else kept
            tokens = texts.written(lambda text: write(query, text, instruction), document, whole)
        elif instruction is not None:
            raise InvalidRequestError(
                "instruction is for rerankers that are asked in words, and this model reads a "
                "query and a document alone: leave it out"
            )
        else:
            tokens = texts.pair(before + query, document, kept)
        texts.limit.check_made_tokens(tokens)
        return tokens

    def score(self, logits: Seq[float], *, is_probability: bool = True) -> float:
        """Return the score of a pair from the logits of `token_ids`.

        Args:
            is_probability: False is for its logit: of no and yes, the difference.
        """
        *no, yes = logits
        logit = yes - sum(no)
        return sigmoid(logit) if is_probability and self.activation == "sigmoid" else logit


def sigmoid(logit: float) -> float:
    """Return 1 / (1 + exp(-logit)), also where that would overflow."""
    return math.exp(min(logit, 0.0)) / (1 + math.exp(-abs(logit)))
