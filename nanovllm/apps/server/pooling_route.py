"""POST /v1/embeddings (OpenAI), /pooling and /v1/score (vLLM), /rerank (Jina, Cohere)."""

import asyncio
import base64
import sys
from array import array
from collections.abc import Sequence as Seq
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from pydantic import BaseModel
from starlette.responses import Response

from nanovllm.apps.server import generation
from nanovllm.apps.server.error_bodies import naming_params
from nanovllm.apps.server.json_route import JSONRoute
from nanovllm.apps.server.protocol.common import PromptTokensDetails
from nanovllm.apps.server.protocol.pooling import (
    Embedding,
    EmbeddingAnswer,
    EmbeddingRequest,
    PooledText,
    PoolingRequest,
    PoolingUsage,
    RerankAnswer,
    RerankRequest,
    RerankResult,
    Score,
    ScoreAnswer,
    ScoreRequest,
    TaskAnswer,
    TaskRequest,
)
from nanovllm.apps.server.sse import json_response
from nanovllm.apps.server.state import state_of
from nanovllm.engine.prompt import make_prompt
from nanovllm.outputs import RequestOutput, ScoringRequestOutput

router = APIRouter(tags=["pooling"], route_class=JSONRoute)

_LARGE_ANSWER = 2**14
"""Numbers in an answer that a thread makes, so that the event loop does not wait."""


@router.post("/v1/embeddings", response_model=EmbeddingAnswer)
async def embed(request: Request, body: EmbeddingRequest) -> Response:
    """Make vectors of texts."""
    outputs = await _embedded(request, body)

    def answer() -> EmbeddingAnswer:
        data = [
            Embedding(index=index, object="embedding", embedding=vector)
            for index, vector in enumerate(_vectors(outputs, body))
        ]
        head = _head(request, body, "embd")
        return EmbeddingAnswer(object="list", data=data, usage=_usage(outputs), **head)

    return await _response(answer, outputs)


@router.post("/pooling", response_model=TaskAnswer)
async def pool(request: Request, body: TaskRequest) -> Response:
    """Make vectors of texts, in vLLM's form."""
    outputs = await _embedded(request, body)

    def answer() -> TaskAnswer:
        data = [
            PooledText(index=index, object="pooling", data=vector)
            for index, vector in enumerate(_vectors(outputs, body))
        ]
        head = _head(request, body, "pool")
        return TaskAnswer(object="list", data=data, usage=_usage(outputs), **head)

    return await _response(answer, outputs)


@router.post("/v1/score", response_model=ScoreAnswer)
@router.post("/score", response_model=ScoreAnswer)
async def score(request: Request, body: ScoreRequest) -> Response:
    """Score pairs of texts: how well the second one answers the first."""
    texts = {"text_1": body.text_1, "text_2": body.text_2}
    results = await _scored(request, body, texts, body.instruction)
    data = [
        Score(index=index, object="score", score=result.outputs.score)
        for index, result in enumerate(results)
    ]
    head = _head(request, body, "score")
    return json_response(ScoreAnswer(object="list", data=data, usage=_usage(results), **head))


@router.post("/v1/rerank", response_model=RerankAnswer)
@router.post("/v2/rerank", response_model=RerankAnswer)
@router.post("/rerank", response_model=RerankAnswer)
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
        found.append(RerankResult(index=index, relevance_score=scores[index], **shown))
    head = _head(request, body, "rerank")
    return json_response(
        RerankAnswer(id=head["id"], model=head["model"], results=found, usage=_usage(results))
    )


async def _embedded(request: Request, body: EmbeddingRequest) -> list[RequestOutput]:
    """Return the outputs for the texts of a request, in their order."""
    given: Any = body.input
    prompts = [given] if isinstance(given, str) or isinstance(given[0], int) else given
    with naming_params(type(body).model_fields, "input"):
        params = body.params(dimensions=body.dimensions, prompt_name=body.prompt_name)
        place = generation.admit(request, len(prompts), body)
        made = [*map(make_prompt, prompts)]
        return await generation.pool(place, made, [params] * len(made), "input")


async def _scored(
    request: Request,
    body: PoolingRequest,
    texts: dict[str, str | list[str]],
    instruction: str | None,
    max_tokens_per_doc: int = 0,
) -> list[ScoringRequestOutput]:
    """Return the scores of the pairs of a request.

    Args:
        texts: the queries and the documents, by the names of their fields.
    """
    processor = state_of(request).llm.engine.input_processor
    names = tuple(texts)
    first, second = ([each] if isinstance(each, str) else each for each in texts.values())
    with naming_params(type(body).model_fields, names[1]):
        params = body.params()
        place = generation.admit(request, len(first) + len(second), body)
        make = partial(
            processor.pooling.scoring, names=names, max_tokens_per_doc=max_tokens_per_doc
        )
        scoring = await place.prepare(make, first, second, params, instruction)
        return scoring.results(await generation.pool(place, scoring.prompts, scoring.params))


def _vectors(outputs: Seq[RequestOutput], body: EmbeddingRequest) -> list[list[float] | str]:
    """Return the vectors in the form that a request asks for."""
    found = []
    for output in outputs:
        assert output.pooled is not None
        found.append(_base64(output.pooled) if body.encoding_format == "base64" else output.pooled)
    return found


def _base64(vector: list[float]) -> str:
    numbers = array("f", vector)
    if sys.byteorder == "big":
        numbers.byteswap()
    return base64.b64encode(numbers.tobytes()).decode()


def _head(request: Request, body: PoolingRequest, prefix: str) -> dict[str, Any]:
    return state_of(request).answer_head(prefix, body.request_id, body.model)


def _usage(outputs: Seq[RequestOutput | ScoringRequestOutput]) -> PoolingUsage:
    num_tokens = sum(len(output.prompt_token_ids) for output in outputs)
    num_cached = sum(output.num_cached_tokens for output in outputs)
    return PoolingUsage(
        prompt_tokens=num_tokens,
        total_tokens=num_tokens,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=num_cached),
    )


async def _response(answer: Any, outputs: Seq[RequestOutput]) -> Response:
    """Return the response of an answer that `answer` makes, in a thread if it is large."""

    def respond() -> Response:
        made: BaseModel = answer()
        return json_response(made)

    numbers = sum(len(output.pooled or ()) for output in outputs)
    return await asyncio.to_thread(respond) if numbers > _LARGE_ANSWER else respond()
