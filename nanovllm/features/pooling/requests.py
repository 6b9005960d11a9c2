"""Texts to vectors and scores: what to ask the ranks for, and what to make of their numbers.

`LLM`, `AsyncLLM` and the server run the requests; this module starts no thread and no event loop.
"""

from collections.abc import Sequence as Seq
from typing import Any

import numpy as np

from nanovllm.engine.input_checks import PromptLimit, check_unicode
from nanovllm.engine.prompt import Prompt
from nanovllm.errors import InvalidRequestError, NanoVLLMError
from nanovllm.features.pooling.checkpoint_files import PoolingSettings, read_settings
from nanovllm.features.pooling.cross_encoder import CrossEncoder
from nanovllm.features.pooling.reranker import Reranker
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
        hidden_size: numbers in a whole vector.
    """

    def __init__(
        self,
        settings: PoolingSettings,
        tokenizer: TextTokenizer | None,
        limit: PromptLimit,
        hidden_size: int,
    ) -> None:
        self.settings = settings
        self.hidden_size = hidden_size
        self._tokenizer = tokenizer
        self._limit = limit
        self._num_logits = (
            limit.last + 1 if limit.generates else int(settings.activation is not None)
        )
        self.reranker: Reranker | CrossEncoder | None = None
        """Scores pairs of texts; None: the similarity of their vectors does."""
        if settings.answers is not None and tokenizer is not None:
            self.reranker = Reranker(tokenizer, settings.answers, limit)
        elif settings.activation is not None and tokenizer is not None:
            self.reranker = CrossEncoder(tokenizer, settings.activation, limit)

    def complete(self, params: PoolingParams, prompt: Prompt) -> tuple[Prompt, PoolingParams]:
        """Return the tokens of a prompt, and `params` as the ranks need them.

        Raises:
            InvalidRequestError: the prompt is invalid or too long, or the model cannot do what
                `params` ask for.
        """
        dimensions = params.dimensions
        if dimensions is not None and dimensions > self.hidden_size:
            raise InvalidRequestError(
                f"dimensions must be at most {self.hidden_size}, the size of this model's vectors, "
                f"got {dimensions}"
            )
        if max(params.token_ids, default=-1) >= self._num_logits:
            last = f"this model's last is {self._num_logits - 1}"
            raise InvalidRequestError(
                f"token_ids holds token {max(params.token_ids)}; "
                f"{last if self._num_logits else 'this model has no logits: leave it out'}"
            )
        if params.token_ids:  # logits follow the last token, and a label's the first
            pooling = "last" if self._limit.generates else "cls"
            for_ranks = PoolingParams(pooling=pooling, normalize=False, token_ids=params.token_ids)
            return self._tokenized(prompt, params), for_ranks
        settings = self.settings
        for_ranks = PoolingParams(
            pooling=params.pooling or settings.pooling,
            normalize=settings.normalize if params.normalize is None else params.normalize,
            dimensions=dimensions,
        )
        return self._tokenized(prompt, params), for_ranks

    def scoring(
        self,
        queries: str | Seq[str],
        documents: str | Seq[str],
        params: PoolingParams | None = None,
        instruction: str | None = None,
    ) -> "Scoring":
        """Return how to score pairs of texts; arguments and errors are those of `Scoring`."""
        return Scoring(self, queries, documents, params, instruction)

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

    def query_params(self, params: PoolingParams) -> PoolingParams:
        """Return `params` with the checkpoint's prompt for queries, if they name none."""
        return self._with_prompt(params, _QUERY_PROMPTS)

    def document_params(self, params: PoolingParams) -> PoolingParams:
        """Return `params` with the checkpoint's prompt for documents, if they name none."""
        return self._with_prompt(params, _DOCUMENT_PROMPTS)

    def _with_prompt(self, params: PoolingParams, names: Seq[str]) -> PoolingParams:
        if params.prompt_name is not None:
            return params
        name = next((name for name in names if name in self.settings.prompts), "")
        return params.clone(prompt_name=name)

    def _tokenized(self, prompt: Prompt, params: PoolingParams) -> Prompt:
        limit = self._limit
        kept = params.truncate_prompt_tokens
        if kept is not None:
            most = limit.most
            kept = most if kept == -1 else min(kept, most)
        tokens = prompt.token_ids
        if tokens is not None:
            if params.prompt_name:
                raise InvalidRequestError(
                    f"prompt_name {shown(params.prompt_name)} is written before a text, and the "
                    "prompt is token ids: give the text"
                )
            return Prompt(prompt.text, tokens if kept is None else tokens[:kept], salt=prompt.salt)
        assert prompt.text is not None
        check_unicode("the prompt", prompt.text)
        text = self._prompt_text(params.prompt_name) + prompt.text
        if self._tokenizer is None:
            raise InvalidRequestError(
                "this engine has no tokenizer, so prompts must be lists of token ids, not text"
            )
        if kept is None:
            limit.check_length(text, self._tokenizer.encode)
            return Prompt(prompt.text, self._tokenizer.encode(text), salt=prompt.salt)
        return Prompt(prompt.text, self._cut(text, kept), salt=prompt.salt)

    def _prompt_text(self, name: str | None) -> str:
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

    def _cut(self, text: str, kept: int) -> list[int]:
        """Return the tokens of the beginning of a text, with those that the tokenizer adds."""
        assert self._tokenizer is not None
        backend: Any = self._tokenizer.backend_tokenizer
        encoding = backend.encode(text, add_special_tokens=False)
        encoding.truncate(max(0, kept - backend.num_special_tokens_to_add(False)))
        tokens: list[int] = backend.post_process(encoding).ids
        return tokens[:kept]


class Scoring:
    """The scores of pairs of texts: the requests that they take, and what comes of their outputs.

    Args:
        queries, documents: as many of both, or one query for all documents.
        instruction: for rerankers: what a document must do for its query.

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
    ) -> None:
        queries, documents = _texts("data_1", queries), _texts("data_2", documents)
        if len(queries) not in (1, len(documents)):
            raise InvalidRequestError(
                f"data_1 has {len(queries)} texts and data_2 has {len(documents)}: give one query "
                "for all documents, or one for each"
            )
        self._pooling = pooling
        self._num_queries = len(queries)
        params = PoolingParams() if params is None else params
        self._is_probability = params.normalize is not False
        self.prompts: list[Prompt]
        self.params: list[PoolingParams]
        reranker = pooling.reranker
        if reranker is not None:
            pairs = zip(
                queries if len(queries) > 1 else [queries[0]] * len(documents),
                documents,
                strict=True,
            )
            kept = params.truncate_prompt_tokens
            self.prompts = [
                Prompt(token_ids=reranker.prompt(query, document, instruction, kept))
                for query, document in pairs
            ]
            self.params = [PoolingParams(token_ids=reranker.token_ids)] * len(self.prompts)
            return
        if instruction is not None:
            raise InvalidRequestError(
                "instruction is for rerankers, and this model compares vectors: write it before "
                "the query"
            )
        if pooling.settings.similarity == "cosine":
            params = params.clone(normalize=True)
        self.prompts = [*map(Prompt, queries), *map(Prompt, documents)]
        self.params = [pooling.query_params(params)] * len(queries)
        self.params += [pooling.document_params(params)] * len(documents)

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
    config: Config, checkpoint: Checkpoint, tokenizer: TextTokenizer | None, limit: PromptLimit
) -> PoolingRequests:
    """Return what an engine knows of vectors and scores.

    Raises:
        CheckpointError: a file of the checkpoint is invalid, or asks for what is not supported.
    """
    hidden_size = read_config(checkpoint.config, config.dtype, config.model_family).hidden_size
    settings = read_settings(checkpoint, config.model, "last" if limit.generates else "cls")
    return PoolingRequests(settings, tokenizer, limit, hidden_size)


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
