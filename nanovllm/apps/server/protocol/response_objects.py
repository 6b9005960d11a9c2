"""Answers of /v1/responses, and the events of a stream of them."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

IfGiven = Annotated[str | None, Field(exclude_if=lambda value: value is None)]
"""A text that is not sent if there is none."""
Status = Literal["in_progress", "completed", "incomplete", "failed"]


class OutputText(BaseModel):
    """The text of a message."""

    type: Literal["output_text"] = "output_text"
    text: str
    annotations: list[Any] = []
    logprobs: list[Any] = []


class ReasoningText(BaseModel):
    """A text that is not meant for the user."""

    type: Literal["reasoning_text"] = "reasoning_text"
    text: str


class OutputMessage(BaseModel):
    """What the model said."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    status: Status = "in_progress"
    content: list[OutputText] = []


class OutputReasoning(BaseModel):
    """What the model thought before."""

    id: str
    type: Literal["reasoning"] = "reasoning"
    status: Status = "in_progress"
    summary: list[Any] = []
    content: list[ReasoningText] = []
    encrypted_content: IfGiven = None


class OutputCall(BaseModel):
    """A function that the model calls."""

    id: str
    type: Literal["function_call"] = "function_call"
    status: Status = "in_progress"
    call_id: str
    name: str
    namespace: IfGiven = None
    arguments: str = ""


class OutputCustomCall(BaseModel):
    """A custom tool that the model calls."""

    id: str
    type: Literal["custom_tool_call"] = "custom_tool_call"
    status: Status = "in_progress"
    call_id: str
    name: str
    namespace: IfGiven = None
    input: str = ""


OutputItem = OutputMessage | OutputReasoning | OutputCall | OutputCustomCall


class InputTokensDetails(BaseModel):
    """What became of the prompt's tokens."""

    cached_tokens: int
    """Those whose KV came from the prefix cache."""
    cache_write_tokens: int = 0


class OutputTokensDetails(BaseModel):
    """What the answer's tokens are for."""

    reasoning_tokens: int


class ResponseUsage(BaseModel):
    """How many tokens a response took."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseError(BaseModel):
    """Why a response failed."""

    code: str
    message: str


class IncompleteDetails(BaseModel):
    """Why a response is incomplete."""

    reason: Literal["max_output_tokens"]


class ResponseObject(BaseModel):
    """An answer, with what was asked for."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    """Unix time in seconds."""
    completed_at: int | None = None
    status: Status = "in_progress"
    background: Literal[False] = False
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    max_tool_calls: None = None
    metadata: dict[str, str] = {}
    model: str
    output: list[OutputItem] = []
    parallel_tool_calls: bool = True
    previous_response_id: str | None = None
    reasoning: dict[str, str | None]
    service_tier: Literal["default"] = "default"
    store: bool = False
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, str] = "auto"
    tools: list[dict[str, Any]]
    top_logprobs: Literal[0] = 0
    top_p: float
    truncation: Literal["auto", "disabled"] = "disabled"
    usage: ResponseUsage | None = None
    user: str | None = None


class DeletedResponse(BaseModel):
    """Says that a response is not stored any more."""

    id: str
    object: Literal["response"] = "response"
    deleted: Literal[True] = True


class InputTokenCount(BaseModel):
    """How long a request's prompt would be."""

    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: int


class ItemList(BaseModel):
    """A page of what a response answers."""

    object: Literal["list"] = "list"
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


class Event(BaseModel):
    """An event of a streamed response; its other fields depend on its type."""

    model_config = ConfigDict(extra="allow")

    type: str
    sequence_number: int
