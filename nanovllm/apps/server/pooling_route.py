"""POST /v1/embeddings (OpenAI), /pooling and /v1/score (vLLM), /rerank (Jina, Cohere)."""

import asyncio
import struct
from base64 import b64encode
from collections.abc import Sequence as Seq
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, Tag, model_validator
from starlette.responses import Response

from nanovllm.apps.server import generation
from nanovllm.apps.server.error_bodies import naming_params
from nanovllm.apps.server.json_route import JSONRoute
from nanovllm.apps.server.protocol import (
    IGNORED,
    MAX_PROMPTS,
    TEXT_OR_LIST,
    EngineRequest,
    Prompts,
)
from nanovllm.apps.server.sse import json_response
from nanovllm.apps.server.state import state_of
from nanovllm.engine.prompt import make_prompt
from nanovllm.options.other_names import other_names
from nanovllm.options.pooling_params import PoolingParams
from nanovllm.outputs import RequestOutput, ScoringRequestOutput

router = APIRouter(tags=["pooling"], route_class=JSONRoute)

_OTHERS = other_names(
    {
        "add_special_tokens": (True,),
        "embed_dtype": ("float32",),
        "endianness": ("native", "little"),
        "mm_processor_kwargs": ({},),
        "truncation_side": ("right",),
        "return_token_offsets": (False,),
    }
)


class PoolingRequest(EngineRequest):
    """The fields of every request for vectors or scores."""

    others = _OTHERS
    ignored = IGNORED
    empty_is_absent = frozenset(["model", "user"])

    truncate_prompt_tokens: int | None = None
    """Keep only so many tokens at the beginning of each text; -1 keeps as many as fit."""
    use_activation: bool | None = None
    """vLLM's name for normalize."""
    normalize: bool | None = None
    """Divide a vector by its length; null is what the checkpoint says."""
    pooling: str | None = None
    """Whose hidden states count; null is what the checkpoint says."""
    request_id: str | None = Field(default=None, min_length=1, max_length=128)

    def params(self, **changes: Any) -> PoolingParams:
        """Return what the request wants of each text.

        Raises:
            InvalidRequestError: a value is invalid.
        """
        normalize = self.use_activation if self.normalize is None else self.normalize
        return PoolingParams(
            pooling=self.pooling,
            normalize=normalize,
            truncate_prompt_tokens=self.truncate_prompt_tokens,
            **changes,
        )


class EmbeddingRequest(PoolingRequest):
    others = _OTHERS | other_names({"task": ("embed",)})

    input: Prompts
    """A text, a list of texts, token ids, or a list of such lists."""
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    prompt_name: str | None = None
    """Which of the checkpoint's prompts to write before each text, such as "query"."""


Texts = Annotated[
    Annotated[str, Tag("text")]
    | Annotated[
        list[str], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True), Tag("list")
    ],
    TEXT_OR_LIST,
]


class ScoreRequest(PoolingRequest):
    """Pairs of texts to score: one for all, or one for each."""

    others = _OTHERS | other_names({"apply_softmax item_first": (False,)})

    text_1: Texts
    """Also called queries or data_1."""
    text_2: Texts
    """Also called documents or data_2."""
    instruction: str | None = None
    """For rerankers: what a document must do for its query."""

    @model_validator(mode="before")
    @classmethod
    def _take_other_names(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        given = dict(given)
        for name, *others in (("text_1", "queries", "data_1"), ("text_2", "documents", "data_2")):
            for other in others:
                if given.get(other) is not None and given.get(name) is None:
                    given[name] = given.pop(other)
        return given


def _as_object(given: Any) -> Any:
    return {"text": given} if isinstance(given, str) else given


class Document(BaseModel):
    """A document with its text, as Jina and Cohere write it, and with any other fields."""

    model_config = ConfigDict(extra="allow")

    text: str


class RerankRequest(PoolingRequest):
    """Documents to sort by how well they answer a query."""

    others = _OTHERS | other_names({"rank_fields": (["text"],), "return_embeddings": (False,)})

    query: str
    documents: Annotated[
        list[Annotated[Document, BeforeValidator(_as_object)]],
        Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True),
    ]
    top_n: Annotated[int, Field(ge=0)] | None = None
    """Return only so many of the best; null and 0 return all."""
    return_documents: bool | None = None
    max_tokens_per_doc: Annotated[int, Field(ge=0)] | None = None
    """Keep only so many tokens at the beginning of each document; null and 0 keep all."""
    instruction: str | None = None
    """For rerankers: what a document must do for the query."""


_LARGE_ANSWER = 2**14
"""Numbers in an answer that a thread makes, so that the event loop does not wait."""


@router.post("/v1/embeddings")
async def embed(request: Request, body: EmbeddingRequest) -> Response:
    """Make vectors of texts."""
    return await _embed(request, body, "embd", "embedding", "embedding")


@router.post("/pooling")
async def pool(request: Request, body: EmbeddingRequest) -> Response:
    """Make vectors of texts, in vLLM's form."""
    return await _embed(request, body, "pool", "pooling", "data")


@router.post("/v1/score")
@router.post("/score")
async def score(request: Request, body: ScoreRequest) -> Response:
    """Score pairs of texts: how well the second one answers the first."""
    texts = {"text_1": body.text_1, "text_2": body.text_2}
    results = await _scored(request, body, texts, body.instruction)
    scores = [result.outputs.score for result in results]
    return _list_response(request, body, "score", "score", "score", scores, results)


@router.post("/v1/rerank")
@router.post("/v2/rerank")
@router.post("/rerank")
async def rerank(request: Request, body: RerankRequest) -> Response:
    """Sort documents by how well they answer a query."""
    documents = body.documents
    texts: dict[str, str | list[str]] = {
        "query": body.query,
        "documents": [each.text for each in documents],
    }
    kept = body.max_tokens_per_doc or 0
    results = await _scored(request, body, texts, body.instruction, kept)
    scores = [result.outputs.score for result in results]
    best = sorted(range(len(scores)), key=lambda index: -scores[index])[: body.top_n or None]
    # Cohere's second version has no documents in answers.
    returns = body.return_documents
    shows = not request.url.path.endswith("/v2/rerank") if returns is None else returns
    found = []
    for index in best:
        shown = {"document": documents[index]} if shows else {}
        found.append({"index": index, "relevance_score": scores[index], **shown})
    head = _head(request, body, "rerank")
    answer = {"id": head["id"], "model": head["model"], "results": found}
    return json_response({**answer, "usage": _usage(results)})


async def _embed(
    request: Request, body: EmbeddingRequest, prefix: str, kind: str, key: str
) -> Response:
    """Answer with a vector for each text: objects of type `kind`, with the vector in `key`."""
    given: Any = body.input
    prompts = [given] if isinstance(given, str) or isinstance(given[0], int) else given
    with naming_params(type(body).model_fields, "input"):
        params = body.params(dimensions=body.dimensions, prompt_name=body.prompt_name)
        place = generation.admit(request, len(prompts), body)
        made = [*map(make_prompt, prompts)]
        outputs = await generation.pool(place, made, [params] * len(made), "input")

    def respond() -> Response:
        vectors: list[Any] = [output.pooled for output in outputs]
        if body.encoding_format == "base64":
            vectors = [b64encode(struct.pack(f"<{len(v)}f", *v)).decode() for v in vectors]
        return _list_response(request, body, prefix, kind, key, vectors, outputs)

    numbers = sum(len(output.pooled or ()) for output in outputs)
    return await asyncio.to_thread(respond) if numbers > _LARGE_ANSWER else respond()


def _list_response(
    request: Request,
    body: PoolingRequest,
    prefix: str,
    kind: str,
    key: str,
    values: Seq[Any],
    outputs: Seq[RequestOutput | ScoringRequestOutput],
) -> Response:
    data = [{"index": index, "object": kind, key: value} for index, value in enumerate(values)]
    head = _head(request, body, prefix)
    return json_response({**head, "object": "list", "data": data, "usage": _usage(outputs)})


async def _scored(
    request: Request,
    body: PoolingRequest,
    texts: dict[str, str | list[str]],
    instruction: str | None,
    most_tokens: int = 0,
) -> list[ScoringRequestOutput]:
    """Return the scores of the pairs in `texts`, which has the two fields by name."""
    processor = state_of(request).llm.engine.input_processor
    names = tuple(texts)
    first, second = ([each] if isinstance(each, str) else each for each in texts.values())
    with naming_params(type(body).model_fields, names[1]):
        params = body.params()
        place = generation.admit(request, len(first) + len(second), body)
        make = partial(processor.pooling.scoring, names=names, max_tokens_per_doc=most_tokens)
        scoring = await place.prepare(make, first, second, params, instruction)
        return scoring.results(await generation.pool(place, scoring.prompts, scoring.params))


def _head(request: Request, body: PoolingRequest, prefix: str) -> dict[str, Any]:
    return state_of(request).answer_head(prefix, body.request_id, body.model)


def _usage(outputs: Seq[RequestOutput | ScoringRequestOutput]) -> dict[str, Any]:
    num_tokens = sum(len(output.prompt_token_ids) for output in outputs)
    details = {"cached_tokens": sum(output.num_cached_tokens for output in outputs)}
    counts = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    return {**counts, "prompt_tokens_details": details}
