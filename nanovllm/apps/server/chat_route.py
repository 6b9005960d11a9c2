"""POST /v1/chat/completions: answers a conversation, with tool calls and reasoning split off."""

import asyncio
from collections.abc import Mapping, Sequence as Seq
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from nanovllm.apps.server import generation
from nanovllm.apps.server.conversation import AnswerReader, prepare, render
from nanovllm.apps.server.error_bodies import naming_params
from nanovllm.apps.server.json_route import JSONRoute
from nanovllm.apps.server.output_parsers.parts import (
    Part,
    ReasoningDelta,
    TextDelta,
    ToolCallArguments,
    ToolCallStart,
)
from nanovllm.apps.server.protocol import ChatRequest, StreamOptions, usage
from nanovllm.apps.server.sse import DONE, TextFrames, frame, json_response, sse
from nanovllm.apps.server.state import ServerState, state_of
from nanovllm.engine.prompt import Prompt
from nanovllm.outputs import CompletionOutput, Logprob, RequestOutput

router = APIRouter(tags=["chat"], route_class=JSONRoute)


@router.post("/v1/chat/completions")
async def answer_chat(request: Request, body: ChatRequest) -> Response:
    """Answer a conversation."""
    server = state_of(request)
    renamed = {**generation.field_names(body), "logprobs": "top_logprobs"}
    if body.max_completion_tokens is not None:
        renamed["max_tokens"] = "max_completion_tokens"
    with naming_params(ChatRequest.model_fields, "messages", renamed):
        place = generation.admit(request, body.n or 1, body)
        limit = body.max_completion_tokens
        logprobs = (body.top_logprobs or 0) if body.logprobs else None
        made = partial(prepare, server, body, _render, max_tokens=limit, logprobs=logprobs)
        prompt, params = await place.prepare(made)
        answer = _Answer(server, body, prompt.text or "")
        if params.prompt_logprobs is None:
            place.frames = answer.frames
        outputs = await generation.run(place, prompt, params, stream=bool(body.stream))
        if body.stream:
            return sse(outputs, answer.frames, in_thread=body.prompt_logprobs is not None)
        output = await anext(outputs)
        if body.logprobs or body.prompt_logprobs is not None:  # the answer may be large
            return await asyncio.to_thread(lambda: json_response(answer.whole(output)))
        return json_response(answer.whole(output))


def _render(server: ServerState, body: ChatRequest) -> Prompt:
    variables = dict(body.chat_template_kwargs or {})
    if body.documents is not None:
        variables["documents"] = body.documents
    if body.reasoning_effort is not None:
        variables.setdefault("reasoning_effort", body.reasoning_effort)
    return render(
        server,
        body.messages,
        tools=body.functions,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        chat_template_kwargs=variables,
    )


class _Choice:
    """One of n answers: its parser, and its frames."""

    def __init__(self, reader: AnswerReader) -> None:
        self.reader = reader
        self.text_frames: TextFrames | None = None
        """Make the frames of mere text; set with the first chunk."""
        self._has_text = False
        self._is_after_call = False

    def parts(self, completion: CompletionOutput) -> list[Part]:
        """Return what is certain after the next piece of the answer.

        A message has one text: what follows a call begins a line of it.
        """
        parts = self.reader.parts(completion)
        for index, part in enumerate(parts):
            if isinstance(part, TextDelta):
                if self._has_text and self._is_after_call:
                    parts[index] = TextDelta(f"\n{part.text}")
                self._has_text, self._is_after_call = True, False
            elif isinstance(part, ToolCallStart):
                self._is_after_call = True
        return parts


class _Answer:
    def __init__(self, server: ServerState, body: ChatRequest, prompt: str) -> None:
        self._body = body.without_large_fields()
        self._token_bytes = server.token_bytes
        readers = (AnswerReader(server, body, prompt) for _ in range(body.n or 1))
        self._choices = [_Choice(reader) for reader in readers]
        self._head = server.answer_head("chatcmpl", body.request_id, body.model)
        self._options = options = body.stream_options or StreamOptions()
        self._is_plain = not (body.logprobs or body.return_token_ids or options.with_each_chunk)
        """Whether the chunk of a text has nothing else that is new."""

    def whole(self, output: RequestOutput) -> dict[str, Any]:
        choices = [self._choice(completion) for completion in output.outputs]
        return {
            **self._head,
            "object": "chat.completion",
            "service_tier": "default",
            "choices": choices,
            "usage": self._usage(output),
            "prompt_token_ids": output.prompt_token_ids if self._body.return_token_ids else None,
            "prompt_logprobs": output.prompt_logprobs,
        }

    def _choice(self, completion: CompletionOutput) -> dict[str, Any]:
        choice = self._choices[completion.index]
        return {
            "index": completion.index,
            "message": _message(choice.parts(completion)),
            "logprobs": self._logprobs(completion),
            "finish_reason": choice.reader.finish_reason(completion),
            "stop_reason": completion.stop_reason,
            "token_ids": completion.token_ids if self._body.return_token_ids else None,
        }

    def frames(self, output: RequestOutput) -> str:
        """Return the frames of chunks for what is new of the answers; at the end the usage if asked
        for.
        """
        frames = []
        for completion in output.outputs:
            choice = self._choices[completion.index]
            if choice.text_frames is None:
                frames.append(frame(self._first_chunk(completion.index, output)))
                text = self._chunk_choice(completion.index, {"content": TextFrames.TEXT})
                choice.text_frames = TextFrames(self._chunk(text, output))
            match choice.parts(completion):
                case [TextDelta() as part] if self._is_plain and completion.finish_reason is None:
                    frames.append(choice.text_frames.frame(part.text))
                case parts:
                    choices = self._chunk_choices(completion, parts)
                    frames += [frame(self._chunk(each, output)) for each in choices]
        if output.finished:
            if self._options.include_usage:
                frames.append(frame({**self._chunk_of(), "usage": self._usage(output)}))
            frames.append(DONE)
        return "".join(frames)

    def _first_chunk(self, index: int, output: RequestOutput) -> dict[str, Any]:
        """Return an answer's first chunk: its role, and what is asked for of the prompt."""
        delta = {"role": "assistant", "content": ""}
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        chunk = self._chunk(choice, output)
        chunk["prompt_token_ids"] = output.prompt_token_ids if self._body.return_token_ids else None
        if self._body.prompt_logprobs is not None and output.prompt_logprobs is not None:
            chunk["prompt_logprobs"] = output.prompt_logprobs
        return chunk

    def _chunk(self, choice: dict[str, Any], output: RequestOutput) -> dict[str, Any]:
        chunk = self._chunk_of(choice)
        if self._options.with_each_chunk:
            chunk["usage"] = self._usage_so_far(output)
        return chunk

    def _chunk_of(self, *choices: dict[str, Any]) -> dict[str, Any]:
        return {**self._head, "object": "chat.completion.chunk", "choices": choices}

    def _usage_so_far(self, output: RequestOutput) -> dict[str, Any]:
        num_output = sum(choice.reader.num_output for choice in self._choices)
        return usage(len(output.prompt_token_ids), num_output, output.num_cached_tokens)

    def _usage(self, output: RequestOutput) -> dict[str, Any]:
        """Return the usage of the whole answer."""
        num_reasoning = sum(choice.reader.num_reasoning_tokens for choice in self._choices)
        details = {"reasoning_tokens": num_reasoning}
        return {**self._usage_so_far(output), "completion_tokens_details": details}

    def _chunk_choices(
        self, completion: CompletionOutput, parts: Seq[Part]
    ) -> list[dict[str, Any]]:
        """Return what is new of an answer: the parts, then the end.

        Tokens' ids and log-probabilities come with the first part, or alone while none is certain.
        """
        body = self._body
        choice = self._choices[completion.index]
        deltas = [_delta(part) for part in parts]
        has_data = bool(completion.token_ids and (body.logprobs or body.return_token_ids))
        if completion.finish_reason is not None or (has_data and not deltas):
            deltas.append({})
        choices = [self._chunk_choice(completion.index, delta) for delta in deltas]
        if has_data:
            choices[0]["logprobs"] = self._logprobs(completion)
            if body.return_token_ids:
                choices[0]["token_ids"] = completion.token_ids
        if completion.finish_reason is not None:
            choices[-1]["finish_reason"] = choice.reader.finish_reason(completion)
            choices[-1]["stop_reason"] = completion.stop_reason
        return choices

    def _chunk_choice(self, index: int, delta: dict[str, Any]) -> dict[str, Any]:
        token_ids: list[int] | None = [] if self._body.return_token_ids else None
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        return {**choice, "token_ids": token_ids}

    def _logprobs(self, completion: CompletionOutput) -> dict[str, Any] | None:
        if not self._body.logprobs:
            return None
        found = zip(completion.token_ids, completion.logprobs or [], strict=True)
        return {"content": [self._token_logprobs(token, entries) for token, entries in found]}

    def _token_logprobs(self, token: int, entries: Mapping[int, Logprob]) -> dict[str, Any]:
        count = self._body.top_logprobs or 0
        top = sorted(entries.items(), key=lambda item: item[1].rank)
        tops = [self._token_logprob(*item) for item in (top if count == -1 else top[:count])]
        return {**self._token_logprob(token, entries[token]), "top_logprobs": tops}

    def _token_logprob(self, token: int, entry: Logprob) -> dict[str, Any]:
        text = entry.decoded_token or ""
        if self._body.return_tokens_as_token_ids:
            text = f"token_id:{token}"
        logprob = max(entry.logprob, generation.LEAST_LOGPROB)
        return {"token": text, "logprob": logprob, "bytes": list(self._token_bytes(token))}


def _message(parts: Seq[Part]) -> dict[str, Any]:
    """Return the message that the parts of a whole answer make."""
    text = ""
    reasoning = ""
    calls: list[dict[str, Any]] = []
    for part in parts:
        match part:
            case TextDelta():
                text += part.text
            case ReasoningDelta():
                reasoning += part.text
            case ToolCallStart():
                function = {"name": part.name, "arguments": ""}
                calls.append({"id": part.call_id, "type": "function", "function": function})
            case ToolCallArguments():
                calls[part.index]["function"]["arguments"] += part.text
    message = {
        "role": "assistant",
        "content": text or (None if calls else ""),
        "refusal": None,
        "reasoning": reasoning or None,  # clients of vLLM's read it whether there is some or not
        "reasoning_content": reasoning or None,  # by its older name
    }
    return {**message, "tool_calls": calls} if calls else message


def _delta(part: Part) -> dict[str, Any]:
    match part:
        case TextDelta():
            return {"content": part.text}
        case ReasoningDelta():
            return {"reasoning": part.text, "reasoning_content": part.text}
        case ToolCallStart():
            function = {"name": part.name, "arguments": ""}
            call = {"index": part.index, "id": part.call_id, "type": "function"}
            return {"tool_calls": [{**call, "function": function}]}
        case ToolCallArguments():
            call = {"index": part.index, "function": {"arguments": part.text}}
            return {"tool_calls": [call]}
