"""POST /tokenize and /detokenize, in vLLM's form."""

from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import BaseModel, Field, model_validator

from nanovllm.server import generation
from nanovllm.server.errors import APIError, naming_params
from nanovllm.server.json_route import JSONRoute
from nanovllm.server.protocol.chat import ChatTools, Messages
from nanovllm.server.protocol.common import RequestModel, refused
from nanovllm.server.rendering import render
from nanovllm.server.state import ServerState, state_of

router = APIRouter(tags=["tokens"], route_class=JSONRoute)


class TokenizeRequest(RequestModel):
    """A text, or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    tools: ChatTools | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _check_prompt(self) -> "TokenizeRequest":
        if (self.prompt is None) == (self.messages is None):
            raise refused("prompt", "give either prompt or messages")
        return self


class TokenizeAnswer(BaseModel):
    """The token ids of a text."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(RequestModel):
    """Token ids."""

    model: str | None = None
    tokens: Annotated[list[int], Field(fail_fast=True)]


class DetokenizeAnswer(BaseModel):
    """The text of token ids."""

    prompt: str


@router.post("/tokenize")
async def tokenize(request: Request, body: TokenizeRequest) -> TokenizeAnswer:
    """Return the token ids of a text or a conversation."""
    server = state_of(request)
    server.check_model(body.model)
    place = generation.admit(request, 1)
    with naming_params(TokenizeRequest.model_fields, "messages" if body.messages else "prompt"):
        tokens, texts = await place.prepare(_tokenize, server, body)
    return TokenizeAnswer(
        count=len(tokens), max_model_len=server.max_model_len, tokens=tokens, token_strs=texts
    )


@router.post("/detokenize")
async def detokenize(request: Request, body: DetokenizeRequest) -> DetokenizeAnswer:
    """Return the text of token ids."""
    server = state_of(request)
    server.check_model(body.model)
    place = generation.admit(request, 1)
    return DetokenizeAnswer(prompt=await place.prepare(_detokenize, server, body.tokens))


def _tokenize(server: ServerState, body: TokenizeRequest) -> tuple[list[int], list[str] | None]:
    """Return the token ids, and the text of each if asked for."""
    processor = server.llm.engine.input_processor
    if body.messages is None:
        assert body.prompt is not None
        processor.check_length("the prompt", body.prompt)
        tokens = processor.encode(body.prompt)
    else:
        tokens = processor.encode(
            render(
                server,
                body.messages,
                tools=body.tools,
                add_generation_prompt=body.add_generation_prompt,
                continue_final_message=body.continue_final_message,
                chat_template_kwargs=body.chat_template_kwargs,
            )
        )
    if not body.return_token_strs:
        return tokens, None
    texts: list[str] = _tokenizer(server).convert_ids_to_tokens(tokens)
    return tokens, texts


def _detokenize(server: ServerState, tokens: list[int]) -> str:
    tokenizer, size = _tokenizer(server), server.llm.engine.cache_info.vocab_size
    for index, token in enumerate(tokens):
        if not 0 <= token < size:
            message = f"tokens[{index}] is {token}; the vocabulary is 0 to {size - 1}"
            raise APIError(400, message, param=f"tokens[{index}]")
    text: str = tokenizer.decode(tokens)
    return text


def _tokenizer(server: ServerState) -> Any:
    tokenizer = server.llm.engine.input_processor.tokenizer
    if tokenizer is None:
        raise APIError(400, "this model has no tokenizer: use token ids")
    return tokenizer
