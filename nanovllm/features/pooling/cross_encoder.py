"""Cross-encoders: a query and a document are one prompt, and the model has one label: the score."""

from collections.abc import Sequence as Seq
from typing import Any

from nanovllm.engine.input_checks import PromptLimit
from nanovllm.errors import InvalidRequestError
from nanovllm.features.pooling.reranker import sigmoid
from nanovllm.loading.text_tokenizer import TextTokenizer


class CrossEncoder:
    """Scores pairs of texts as `Reranker` does, by a head of the model.

    Args:
        activation: "sigmoid" or "identity": what makes a score of the label's logit.
        limit: how long a prompt may be.
    """

    token_ids = (0,)
    """The model's logits are those of its labels."""

    def __init__(self, tokenizer: TextTokenizer, activation: str, limit: PromptLimit) -> None:
        self._backend: Any = tokenizer.backend_tokenizer
        self._activation = activation
        self._limit = limit

    def prompt(
        self, query: str, document: str, instruction: str | None, kept: int | None
    ) -> list[int]:
        """Return the token ids of a pair, with those that the tokenizer puts around its texts.

        Args:
            kept: how many tokens to keep at the beginning of the document; -1: as many as fit;
                None: to refuse a pair that is too long.

        Raises:
            InvalidRequestError: the texts are too long, or there is an instruction.
        """
        if instruction is not None:
            raise InvalidRequestError(
                "instruction is for rerankers that are asked in words, and this model reads a "
                "query and a document alone: leave it out"
            )
        limit = self._limit
        limit.check_text("the query", query)
        if kept is None:
            limit.check_text("the document", document)
        first, second = (
            self._backend.encode(text, add_special_tokens=False) for text in (query, document)
        )
        room = limit.most - self._backend.num_special_tokens_to_add(True) - len(first)
        if kept is not None:
            second.truncate(max(0, room if kept == -1 else kept))
        tokens: list[int] = self._backend.post_process(first, second).ids
        if len(second) > room:
            raise limit.exceeded(str(len(tokens)))
        limit.check_made_tokens(tokens)
        return tokens

    def score(self, logits: Seq[float], *, is_probability: bool = True) -> float:
        """Return the score of a pair from its label's logit; or the logit, as `Reranker.score`."""
        (logit,) = logits
        if self._activation == "identity" or not is_probability:
            return logit
        return sigmoid(logit)
