"""Texts to vectors and scores: what to ask the ranks for, and what to make of their numbers.

`LLM`, `AsyncLLM` and the server run the requests; this module starts no thread and no event loop.
"""

from collections.abc import Iterator, Sequence as Seq
from contextlib import contextmanager
from typing import Any

import numpy as np

from nanovllm.engine.input_checks import PromptLimit, check_unicode
from nanovllm.engine.prompt import Prompt
from nanovllm.errors import CheckpointError, InvalidRequestError, NanoVLLMError
from nanovllm.features.pooling.checkpoint_files import DenseFile, PoolingSettings, read_settings
from nanovllm.features.pooling.rank_pooling import check_layers
from nanovllm.features.pooling.reranker import Render, Reranker, Write, asked, messages, templated
from nanovllm.features.pooling.texts import Texts
from nanovllm.loading.hub import Checkpoint
from nanovllm.loading.text_tokenizer import TextTokenizer
from nanovllm.models.registry import read_config
from nanovllm.options.config import Config
from nanovllm.options.pooling_params import PoolingParams
from nanovllm.options.validation import shown
from nanovllm.outputs import (
    EmbeddingOutput,
    EmbeddingRequestOutput,
    RequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
)

_QUERY_PROMPTS = ("query",)
_DOCUMENT_PROMPTS = ("document", "passage", "corpus")
"""The prompts for queries and documents, the first that a checkpoint has; as sentence-transformers'
`encode_query` and `encode_document`."""


class PoolingRequests:
    """What an engine knows to make vectors and scores.

    Args:
        tokenizer: None if the checkpoint has none; prompts are then token ids.
        hidden_size: numbers in the hidden state of a token.
        render: of the checkpoint's chat template.
        causal: whether the model's logits follow the last token; else the first.
    """

    def __init__(
        self,
        settings: PoolingSettings,
        tokenizer: TextTokenizer | None,
        limit: PromptLimit,
        hidden_size: int,
        render: Render | None = None,
        causal: bool = True,
    ) -> None:
        self.settings = settings
        sizes = [each.out_features for _, each in settings.layers if isinstance(each, DenseFile)]
        self.size = (sizes or [hidden_size])[-1]
        """Numbers in a whole vector."""
        self._limit = limit
        self._render = render
        self._logits_pooling = "last" if causal else "cls"
        has_label = settings.activation is not None and not settings.answers
        self._num_logits = int(has_label) or (limit.last + 1) * limit.generates
        self.texts: Texts | None = None
        self.reranker: Reranker | None = None
        """Scores pairs of texts; None: the similarity of their vectors does."""
        if tokenizer is not None:
            self.texts = Texts(
                tokenizer,
                limit,
                settings.max_tokens,
                settings.lowers_case,
                "left" if settings.keeps_end else "right",
            )
            if settings.activation is not None:
                write: Write | None = asked if settings.asks else None
                if settings.template is not None and render is not None:
                    write = templated(render, settings.template)
                token_ids = tuple(self._answer(self.texts, each) for each in settings.answers)
                self.reranker = Reranker(self.texts, token_ids or (0,), settings.activation, write)

    def _answer(self, texts: Texts, answer: str | int) -> int:
        """Return the token of an answer."""
        if isinstance(answer, int):
            if answer > self._limit.last:
                raise CheckpointError(
                    f"LogitScore names token {answer}; this model's last is {self._limit.last}"
                )
            return answer
        found = texts.plain(answer)
        if len(found) != 1:
            raise CheckpointError(
                f"classifier_from_token: {answer!r} must be one token of this tokenizer, is "
                f"{len(found)}"
            )
        return found[0]

    def complete(self, params: PoolingParams, prompt: Prompt) -> tuple[Prompt, PoolingParams]:
        """Return the tokens of a prompt, and `params` as the ranks need them.

        Raises:
            InvalidRequestError: the prompt is invalid or too long, or the model cannot do what
                `params` ask for.
        """
        settings = self.settings
        dimensions = params.dimensions
        if dimensions is not None and dimensions > self.size:
            raise InvalidRequestError(
                f"dimensions must be at most {self.size}, the size of this model's vectors, "
                f"got {dimensions}"
            )
        if max(params.token_ids, default=-1) >= self._num_logits:
            last = f"this model's last is {self._num_logits - 1}"
            raise InvalidRequestError(
                f"token_ids holds token {max(params.token_ids)}; "
                f"{last if self._num_logits else 'this model has no logits: leave it out'}"
            )
        if dimensions is None and params.normalize:  # of what is left of the vector
            dimensions = settings.dimensions
        for_ranks = PoolingParams(
            pooling=params.pooling or settings.pooling,
            normalize=settings.normalize if params.normalize is None else params.normalize,
            dimensions=dimensions,
        )
        if params.token_ids:  # logits follow the last token, and a label's the first
            pooling = self._logits_pooling
            for_ranks = PoolingParams(pooling=pooling, normalize=False, token_ids=params.token_ids)
        return self.tokenized(prompt, params), for_ranks

    def scoring(
        self,
        queries: str | Seq[str],
        documents: str | Seq[str],
        params: PoolingParams | None = None,
        instruction: str | None = None,
        **options: Any,
    ) -> "Scoring":
        """Return how to score pairs of texts; arguments and errors are those of `Scoring`."""
        return Scoring(self, queries, documents, params, instruction, **options)

    def embedding(self, output: RequestOutput) -> EmbeddingRequestOutput:
        """Return the output of `LLM.embed` for that of a request.

        Raises:
            NanoVLLMError: as for `pooled`.
        """
        return EmbeddingRequestOutput(
            output.request_id,
            EmbeddingOutput(pooled(output)),
            output.prompt_token_ids,
            output.num_cached_tokens,
        )

    def with_prompt(self, params: PoolingParams, names: Seq[str]) -> PoolingParams:
        """Return `params` with the first of the prompts `names` that the checkpoint has, if they
        name none.
        """
        if params.prompt_name is not None:
            return params
        name = next((name for name in names if name in self.settings.prompts), "")
        return params.clone(prompt_name=name)

    def tokenized(self, prompt: Prompt, params: PoolingParams) -> Prompt:
        """Return a prompt as token ids.

        Raises:
            InvalidRequestError: it is empty, invalid or too long.
        """
        kept = params.truncate_prompt_tokens
        tokens = prompt.token_ids
        if tokens is not None:
            if params.prompt_name:
                raise InvalidRequestError(
                    f"prompt_name {shown(params.prompt_name)} is written before a text, and the "
                    "prompt is token ids: give the text"
                )
            most = self._limit.most if kept == -1 else kept
            return Prompt(prompt.text, tokens[:most], salt=prompt.salt)
        assert prompt.text is not None
        check_unicode("the prompt", prompt.text)
        if (texts := self.texts) is None:
            raise InvalidRequestError(
                "this engine has no tokenizer, so prompts must be lists of token ids, not text"
            )
        before = self.prompt_text(params.prompt_name)
        render, options = self._render, self.settings.template
        if render is None or options is None:
            tokens = texts.one(before + prompt.text, kept)
        else:
            tokens = texts.written(
                lambda text: render(messages(before, user=text), options), prompt.text, kept
            )
        if not tokens:
            raise InvalidRequestError(
                "the prompt is empty, and this model's tokenizer adds nothing to it: give a text"
            )
        return Prompt(prompt.text, tokens, salt=prompt.salt)

    def prompt_text(self, name: str | None) -> str:
        """Return what is written before a text."""
        prompts = self.settings.prompts
        if name is None:
            name = self.settings.default_prompt_name or ""
        if name == "":
            return ""
        if name not in prompts:
            known = ", ".join(map(shown, prompts)) or "none"
            raise InvalidRequestError(
                f"prompt_name {shown(name)} is not a prompt of this checkpoint; it has {known}"
            )
        return prompts[name]


class Scoring:
    """The scores of pairs of texts: the requests that they take, and what comes of their outputs.

    Args:
        queries, documents: as many of both, or one query for all documents.
        instruction: for rerankers: what a document must do for its query.
        names: what errors call the queries and the documents.
        max_tokens_per_doc: how many tokens to keep at the beginning of a document; 0: all.

    Attributes:
        prompts, params: of the requests to run, one for each.

    Raises:
        InvalidRequestError: the numbers of texts differ, a text is too long, or the model cannot do
            what the arguments ask for.
    """

    def __init__(
        self,
        pooling: PoolingRequests,
        queries: str | Seq[str],
        documents: str | Seq[str],
        params: PoolingParams | None = None,
        instruction: str | None = None,
        names: tuple[str, str] = ("data_1", "data_2"),
        max_tokens_per_doc: int = 0,
    ) -> None:
        queries, documents = _texts(names[0], queries), _texts(names[1], documents)
        if len(queries) not in (1, len(documents)):
            raise InvalidRequestError(
                f"{names[0]} has {len(queries)} texts and {names[1]} has {len(documents)}: give "
                "one query for all documents, or one for each"
            )
        self._pooling = pooling
        self.prompts: list[Prompt] = []
        self._num_queries = len(queries)
        params = PoolingParams() if params is None else params
        self._is_probability = params.normalize is not False
        if max_tokens_per_doc and pooling.texts is not None:
            documents = [pooling.texts.beginning(each, max_tokens_per_doc) for each in documents]
        if pooling.reranker is not None:
            before = pooling.prompt_text(params.prompt_name)
            kept = params.truncate_prompt_tokens
            for index, document in enumerate(documents):
                query = queries[index % len(queries)]
                with _naming(f"{names[1]}[{index}]"):
                    tokens = pooling.reranker.prompt(query, document, instruction, kept, before)
                    self.prompts.append(Prompt(token_ids=tokens))
            self.params = [PoolingParams(token_ids=pooling.reranker.token_ids)] * len(documents)
            return
        if instruction is not None:
            raise InvalidRequestError(
                "instruction is for rerankers, and this model compares vectors: write it before "
                "the query"
            )
        if pooling.settings.similarity == "cosine":
            params = params.clone(normalize=True)
        for name, texts, prompts in (
            (names[0], queries, _QUERY_PROMPTS),
            (names[1], documents, _DOCUMENT_PROMPTS),
        ):
            each = pooling.with_prompt(params, prompts)
            for index, text in enumerate(texts):
                with _naming(f"{name}[{index}]"):
                    self.prompts.append(pooling.tokenized(Prompt(text), each))
        params = params.clone(prompt_name=None, truncate_prompt_tokens=None)
        self.params = [params] * len(self.prompts)

    def results(self, outputs: Seq[RequestOutput]) -> list[ScoringRequestOutput]:
        """Return the score of each pair, from the outputs of the requests in their order.

        Raises:
            NanoVLLMError: a request failed, or was aborted.
        """
        return [
            ScoringRequestOutput(
                of_pair[-1].request_id,
                ScoringOutput(score),
                [token for output in of_pair for token in output.prompt_token_ids],
                sum(output.num_cached_tokens for output in of_pair),
            )
            for of_pair, score in zip(self._pairs(outputs), self._scores(outputs), strict=True)
        ]

    def _scores(self, outputs: Seq[RequestOutput]) -> list[float]:
        values = [pooled(output) for output in outputs]
        reranker = self._pooling.reranker
        if reranker is not None:
            is_probability = self._is_probability
            return [reranker.score(logits, is_probability=is_probability) for logits in values]
        vectors = np.asarray(values, dtype=np.float64)
        first, second = vectors[: self._num_queries], vectors[self._num_queries :]
        match self._pooling.settings.similarity:
            case "euclidean":
                found = -np.sqrt(((first - second) ** 2).sum(-1))
            case "manhattan":
                found = -np.abs(first - second).sum(-1)
            case _:
                found = (first * second).sum(-1)
        scores: list[float] = found.tolist()
        return scores

    def _pairs(self, outputs: Seq[RequestOutput]) -> list[list[RequestOutput]]:
        """Return the outputs that the score of each pair comes from."""
        if self._pooling.reranker is not None:
            return [[output] for output in outputs]
        first, second = outputs[: self._num_queries], outputs[self._num_queries :]
        return [[first[index % len(first)], output] for index, output in enumerate(second)]


def pooling_requests(
    config: Config,
    checkpoint: Checkpoint,
    tokenizer: TextTokenizer | None,
    limit: PromptLimit,
    render: Render,
    causal: bool,
) -> PoolingRequests:
    """Return what an engine knows of vectors and scores; see `PoolingRequests`.

    Raises:
        CheckpointError: a file of the checkpoint is invalid, or asks for what is not supported.
    """
    hidden_size = read_config(checkpoint.config, config.dtype, config.model_family).hidden_size
    settings = read_settings(checkpoint, config.model, "last" if causal else "cls")
    check_layers(settings, hidden_size)
    return PoolingRequests(settings, tokenizer, limit, hidden_size, render, causal)


@contextmanager
def _naming(name: str) -> Iterator[None]:
    """Name what an InvalidRequestError is about, first of all."""
    try:
        yield
    except InvalidRequestError as error:
        raise type(error)(f"{name}: {error}") from None


def pooled(output: RequestOutput) -> list[float]:
    """Return the numbers of a request that was pooled.

    Raises:
        NanoVLLMError: it failed, or was aborted.
    """
    if output.pooled is None:
        reason = output.outputs[0].stop_reason or output.outputs[0].finish_reason
        raise NanoVLLMError(f"request {output.request_id} has no vector: {reason}")
    return output.pooled


def _texts(name: str, given: str | Seq[str]) -> list[str]:
    """Return the texts of an argument that is one text or a list of them."""
    texts = [given] if isinstance(given, str) else given
    if not isinstance(texts, list | tuple) or not texts:
        raise InvalidRequestError(f"{name} must be a text or a list of texts, got {shown(given)}")
    for index, text in enumerate(texts):
        if not isinstance(text, str):
            raise InvalidRequestError(f"{name}[{index}] must be a text, got {shown(text)}")
        check_unicode(f"{name}[{index}]", text)
    return list(texts)
