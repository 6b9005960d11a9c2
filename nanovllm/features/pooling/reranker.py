"""Prompts of rerankers that generate: whether a document meets a query, asked as yes or no.

The template is Qwen3-Reranker's (arXiv:2506.05176, and its model card).
"""

import math
from collections.abc import Sequence as Seq

from nanovllm.engine.input_checks import PromptLimit
from nanovllm.errors import CheckpointError
from nanovllm.loading.text_tokenizer import TextTokenizer

INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
"""What a document must do for its query, if a request does not say it."""
_BEGINNING = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and "
    'the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n"
)
_END = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


class Reranker:
    """Asks a generating model about a query and a document.

    Args:
        answers: the tokens for no and yes, or their texts.
        limit: how long a prompt may be.

    Raises:
        CheckpointError: a text is not one token.
    """

    def __init__(
        self, tokenizer: TextTokenizer, answers: tuple[str | int, str | int], limit: PromptLimit
    ) -> None:
        self._tokenizer = tokenizer
        self._limit = limit
        self.token_ids = self._token(answers[0]), self._token(answers[1])
        """Of no and of yes."""
        self._beginning = self._encode(_BEGINNING)
        self._end = self._encode(_END)

    def prompt(
        self, query: str, document: str, instruction: str | None, kept: int | None
    ) -> list[int]:
        """Return the token ids of the question.

        Args:
            kept: how many tokens to keep at the beginning of the document; -1: as many as fit;
                None: to refuse one that is too long.

        Raises:
            InvalidRequestError: the texts are too long.
        """
        limit = self._limit
        instruction = INSTRUCTION if instruction is None else instruction
        limit.check_text("the query", instruction, query)
        if kept is None:
            limit.check_text("the document", document)
        elif kept > 0:
            document = self._shortened(document, kept)
        body = self._encode(f"<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}")
        room = limit.most - len(self._beginning) - len(self._end)
        if kept == -1:
            body = body[: max(0, room)]
        if len(body) > room:
            raise limit.exceeded(str(len(self._beginning) + len(body) + len(self._end)))
        return [*self._beginning, *body, *self._end]

    def score(self, logits: Seq[float], *, is_probability: bool = True) -> float:
        """Return the probability of yes, when the answer is yes or no, from their logits.

        Args:
            is_probability: False is for its logit, the difference of the two.
        """
        no, yes = logits
        difference = yes - no
        return sigmoid(difference) if is_probability else difference

    def _token(self, answer: str | int) -> int:
        if isinstance(answer, int):
            if answer > self._limit.last:
                raise CheckpointError(
                    f"LogitScore names token {answer}; this model's last is {self._limit.last}"
                )
            return answer
        found = self._encode(answer)
        if len(found) != 1:
            raise CheckpointError(
                f"classifier_from_token: {answer!r} must be one token of this tokenizer, is "
                f"{len(found)}"
            )
        return found[0]

    def _shortened(self, text: str, kept: int) -> str:
        """Return the part of a text that its first `kept` tokens hold."""
        offsets = self._tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).offsets
        return text if len(offsets) <= kept else text[: offsets[kept - 1][1]]

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)


def sigmoid(logit: float) -> float:
    """Return 1 / (1 + exp(-logit)), also where that would overflow."""
    return math.exp(min(logit, 0.0)) / (1 + math.exp(-abs(logit)))
