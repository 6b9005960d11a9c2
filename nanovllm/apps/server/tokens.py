"""POST /tokenize and /detokenize, GET /tokenizer_info, in vLLM's form."""

import dataclasses
from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import Field, model_validator

from nanovllm.apps.server import generation
from nanovllm.apps.server.conversation import render
from nanovllm.apps.server.error_bodies import APIError, naming_params
from nanovllm.apps.server.json_route import JSONRoute
from nanovllm.apps.server.protocol import ChatTools, Messages, RequestModel, refused
from nanovllm.apps.server.state import ServerState, state_of
from nanovllm.engine.prompt import Prompt
from nanovllm.options.other_names import other_names

router = APIRouter(tags=["tokens"], route_class=JSONRoute)


class TokenizeRequest(RequestModel):
    others = other_names({"chat_template": (), "with_pieces": (False,)})

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    tools: ChatTools | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: bool | None = None
    """Whether the tokenizer's own tokens, such as that of the beginning, are put around the text.
    Without a value they are for a text, and the template writes them for a conversation."""
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _check_prompt(self) -> "TokenizeRequest":
        if (self.prompt is None) == (self.messages is None):
            raise refused("prompt", "give either prompt or messages")
        return self


class DetokenizeRequest(RequestModel):
    model: str | None = None
    tokens: Annotated[list[int], Field(fail_fast=True)]


@router.get("/tokenizer_info")
async def tokenizer_info(request: Request) -> dict[str, Any]:
    """Describe the tokenizer, so that a client can use it through /tokenize."""
    server = state_of(request)
    tokenizer = _tokenizer(server)
    tokens = tokenizer.special_tokens_map
    template = tokenizer.chat_template if server.chat_template is None else server.chat_template
    if isinstance(template, dict):  # several templates by name
        template = template.get("default")
    added = tokenizer.added_tokens_decoder
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",  # the class that loads each tokenizer.json
        **{name: tokens.get(name) for name in ("bos_token", "eos_token", "unk_token", "pad_token")},
        "chat_template": template,
        "added_tokens_decoder": {token_id: token.content for token_id, token in added.items()},
    }


@router.post("/tokenize")
async def tokenize(request: Request, body: TokenizeRequest) -> dict[str, Any]:
    """Return the token ids of a text or a conversation."""
    server = state_of(request)
    server.check_model(body.model)
    place = generation.admit(request, 1)
    with naming_params(TokenizeRequest.model_fields, "messages" if body.messages else "prompt"):
        prompt = await generation.opened(place, await place.prepare(_prompt, server, body))
        tokens, texts = await place.prepare(_tokenize, server, body, prompt)
    answer = {"count": len(tokens), "max_model_len": server.max_model_len, "tokens": tokens}
    return {**answer, "token_strs": texts}


@router.post("/detokenize")
async def detokenize(request: Request, body: DetokenizeRequest) -> dict[str, str]:
    """Return the text of token ids."""
    server = state_of(request)
    server.check_model(body.model)
    place = generation.admit(request, 1)
    return {"prompt": await place.prepare(_detokenize, server, body.tokens)}


def _prompt(server: ServerState, body: TokenizeRequest) -> Prompt:
    """Return the text or the conversation."""
    if body.messages is None:
        assert body.prompt is not None
        server.llm.engine.input_processor.limit.check_text("the prompt", body.prompt)
        prompt = Prompt(body.prompt)
    else:
        prompt = render(
            server,
            body.messages,
            tools=[tool.function for tool in body.tools or ()],
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
            chat_template_kwargs=body.chat_template_kwargs,
        )
    if body.add_special_tokens is not None:
        prompt = dataclasses.replace(prompt, rendered=not body.add_special_tokens)
    return prompt


def _tokenize(
    server: ServerState, body: TokenizeRequest, prompt: Prompt
) -> tuple[list[int], list[str] | None]:
    """Return the token ids, and the text of each if asked for."""
    tokens = server.llm.engine.input_processor.token_ids(prompt)
    if not body.return_token_strs:
        return tokens, None
    texts: list[str] = _tokenizer(server).convert_ids_to_tokens(tokens)
    return tokens, texts


def _detokenize(server: ServerState, tokens: list[int]) -> str:
    tokenizer = _tokenizer(server)
    size = server.llm.engine.worker_info.vocab_size
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
