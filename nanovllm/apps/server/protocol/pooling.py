"""Requests and answers of embeddings, scores and reranking; OpenAI's, vLLM's, Jina's and Cohere's.

Types only: ranges are checked by `PoolingParams`, which has the better messages.
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Generic, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, Tag, field_validator, model_validator

from nanovllm.apps.server.protocol.common import (
    IGNORED,
    TEXT_OR_LIST,
    EngineRequest,
    PromptTokensDetails,
)
from nanovllm.apps.server.protocol.completions import MAX_PROMPTS, Prompts
from nanovllm.options.other_names import OtherName, other_names
from nanovllm.options.pooling_params import PoolingParams

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

    others: ClassVar[Mapping[str, OtherName]] = _OTHERS
    ignored: ClassVar[frozenset[str]] = IGNORED
    empty_is_absent: ClassVar[frozenset[str]] = frozenset(["model", "user"])

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
    """Texts to make vectors of."""

    input: Prompts
    """A text, a list of texts, token ids, or a list of such lists."""
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    """How many numbers of each vector to return."""
    prompt_name: str | None = None
    """Which of the checkpoint's prompts to write before each text, such as "query"."""


class TaskRequest(EmbeddingRequest):
    """Texts to make vectors of, with vLLM's name for that."""

    others: ClassVar[Mapping[str, OtherName]] = {**_OTHERS, **other_names({"task": ("embed",)})}


Texts = Annotated[
    Annotated[str, Tag("text")]
    | Annotated[
        list[str], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True), Tag("list")
    ],
    TEXT_OR_LIST,
]


class ScoreRequest(PoolingRequest):
    """Pairs of texts to score: one for all, or one for each."""

    others: ClassVar[Mapping[str, OtherName]] = {
        **_OTHERS,
        **other_names({"apply_softmax item_first": (False,)}),
    }

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


class Document(BaseModel):
    """A document with its text, as Jina and Cohere write it, and with any other fields."""

    model_config = ConfigDict(extra="allow")

    text: str


class RerankRequest(PoolingRequest):
    """Documents to sort by how well they answer a query."""

    others: ClassVar[Mapping[str, OtherName]] = {
        **_OTHERS,
        **other_names({"rank_fields": (["text"],), "return_embeddings": (False,)}),
    }

    query: str
    documents: Annotated[
        list[Document], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)
    ]
    top_n: Annotated[int, Field(ge=0)] | None = None
    """Return only so many of the best; null and 0 return all."""
    return_documents: bool | None = None
    max_tokens_per_doc: Annotated[int, Field(ge=0)] | None = None
    """Keep only so many tokens at the beginning of each document; null and 0 keep all."""
    instruction: str | None = None
    """For rerankers: what a document must do for the query."""

    @field_validator("documents", mode="before")
    @classmethod
    def _take_texts(cls, given: Any) -> Any:
        """Return documents, some of which are texts, as objects."""
        if not isinstance(given, list):
            return given
        return [{"text": each} if isinstance(each, str) else each for each in given]


class PoolingUsage(BaseModel):
    """How many tokens a request took."""

    prompt_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


Item = TypeVar("Item")


class ListAnswer(BaseModel, Generic[Item]):
    """An answer with one item for each text, or pair of texts, in their order."""

    id: str
    object: Literal["list"]
    created: int
    """Unix time in seconds."""
    model: str
    system_fingerprint: str
    data: list[Item]
    usage: PoolingUsage


class Embedding(BaseModel):
    """The vector of a text."""

    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str
    """In base64: the numbers as float32, in little-endian order."""


class EmbeddingAnswer(ListAnswer[Embedding]):
    """The vectors of texts, in their order."""


class PooledText(BaseModel):
    """The vector of a text, by vLLM's name."""

    object: Literal["pooling"] = "pooling"
    index: int
    data: list[float] | str


class TaskAnswer(ListAnswer[PooledText]):
    """The vectors of texts, in their order."""


class Score(BaseModel):
    """The score of a pair."""

    object: Literal["score"] = "score"
    index: int
    score: float


class ScoreAnswer(ListAnswer[Score]):
    """The scores of pairs, in their order."""


class RerankResult(BaseModel):
    """A document's score, and the document if it is to be returned."""

    index: int
    relevance_score: float
    document: Document | None = None


class RerankAnswer(BaseModel):
    """The best documents, the best of all first."""

    id: str
    model: str
    results: list[RerankResult]
    usage: PoolingUsage
