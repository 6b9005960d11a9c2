"""POST /v1/completions: continues texts or token ids, with echo and log-probabilities."""

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Sequence as Seq
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from nanovllm.apps.server import generation
from nanovllm.apps.server.error_bodies import naming_params
from nanovllm.apps.server.json_route import JSONRoute
from nanovllm.apps.server.protocol import CompletionRequest, StreamOptions, usage
from nanovllm.apps.server.sse import DONE, TextFrames, frame, json_response, sse
from nanovllm.apps.server.state import ServerState, state_of
from nanovllm.engine.detokenizer import Detokenizer
from nanovllm.engine.prompt import make_prompt
from nanovllm.options.sampling_params import SamplingParams
from nanovllm.outputs import CompletionOutput, Logprob, RequestOutput

MAX_TOKENS = 16
"""max_tokens if the request gives none, as OpenAI's."""

router = APIRouter(tags=["completions"], route_class=JSONRoute)

TokenLogprobs = dict[int, Logprob] | None
"""Log-probabilities at one position, the position's own token first; None for the first one."""


@router.post("/v1/completions")
async def complete(request: Request, body: CompletionRequest) -> Response:
    """Continue one prompt or many."""
    server = state_of(request)
    with naming_params(CompletionRequest.model_fields, "prompt", generation.field_names(body)):
        params = _params(server, body)
        prompts = _prompts(server, body)
        answer = _Answer(server, body, params, len(prompts))
        generation.check_logprobs(server, params, map(len, prompts))
        place = generation.admit(request, params.n * len(prompts), body)
        if len(prompts) == 1 and params.prompt_logprobs is None:
            place.frames = partial(answer.frames, 0)
        outputs = await generation.run_all(
            place,
            [dataclasses.replace(make_prompt(prompt), salt=body.cache_salt) for prompt in prompts],
            params,
            stream=bool(body.stream),
        )
        if body.stream:
            is_large = params.prompt_logprobs is not None
            return sse(outputs, lambda each: answer.frames(*each), in_thread=is_large)
        whole = await answer.whole(outputs)
        if answer.may_be_large:
            return await asyncio.to_thread(json_response, whole)
        return json_response(whole)


def _prompts(server: ServerState, body: CompletionRequest) -> list[str | list[int]]:
    """Return the prompts, whose lengths are checked."""
    given: Any = body.prompt
    if isinstance(given, str) or isinstance(given[0], int):
        given = [given]
    for prompt in given:
        if isinstance(prompt, str):  # also one that is to be cut: to tokenize it takes seconds
            server.llm.engine.input_processor.limit.check_text("the prompt", prompt)
    return list(given)


def _params(server: ServerState, body: CompletionRequest) -> SamplingParams:
    changes: dict[str, Any] = {}
    if body.max_tokens == 0 and body.echo:  # only the prompt is wanted: its output is left out
        changes |= {"max_tokens": 1, "min_tokens": 0}
    if body.echo and body.prompt_logprobs is None:
        changes["prompt_logprobs"] = body.logprobs
    return generation.sampling_params(
        server, body, default_max_tokens=MAX_TOKENS, logprobs=body.logprobs, **changes
    )


class _Answer:
    def __init__(
        self,
        server: ServerState,
        body: CompletionRequest,
        params: SamplingParams,
        num_prompts: int,
    ) -> None:
        self._body = body.without_large_fields()
        self._params = params
        self._make_detokenizer = server.llm.engine.output_processor.make_detokenizer
        self._tokenizer: Any = server.llm.engine.input_processor.tokenizer
        self._n = body.n or 1
        self._num_unfinished = num_prompts
        self.may_be_large = body.logprobs is not None or body.prompt_logprobs is not None
        """Whether making the whole answer takes so long that a thread does it."""
        self._keeps_output = not (body.echo and body.max_tokens == 0)
        self._head: dict[str, Any] = {
            "object": "text_completion",
            **server.answer_head("cmpl", body.request_id, body.model),
        }
        self._num_prompt: dict[int, int] = {}  # tokens, by prompt
        self._num_cached: dict[int, int] = {}
        self._num_output = 0
        self._has_begun = set[tuple[int, int]]()  # continuations of which a chunk was made
        self._plain: dict[tuple[int, int], TextFrames] = {}  # what makes their next frames
        self._options = options = body.stream_options or StreamOptions()
        self._is_plain = self._keeps_output and not (
            self.may_be_large or body.return_token_ids or options.with_each_chunk
        )
        """Whether the text alone is new in a frame after a continuation's first one."""
        # What a stream sends with the first chunk of each continuation, by prompt.
        self._prompt_logprobs: dict[int, list[TokenLogprobs]] = {}
        # For text_offset, by choice: where the output begins in the text, and what reads it.
        self._texts: dict[int, tuple[int, Detokenizer | None]] = {}

    async def whole(self, outputs: AsyncIterator[tuple[int, RequestOutput]]) -> dict[str, Any]:
        choices: list[dict[str, Any]] = []
        async for prompt_index, output in outputs:
            self._count(prompt_index, output)
            for completion in output.outputs:
                make = partial(self._choice, prompt_index, output, completion)
                choices.append(await asyncio.to_thread(make) if self.may_be_large else make())
        choices.sort(key=lambda choice: int(choice["index"]))
        return {**self._head, "choices": choices, "usage": self._usage()}

    def frames(self, prompt_index: int, output: RequestOutput) -> str:
        """Return the frames of chunks for what is new of a prompt; at the end the usage if asked
        for.
        """
        self._count(prompt_index, output)
        frames = []
        for completion in output.outputs:
            index = (prompt_index, completion.index)
            if index in self._plain and completion.finish_reason is None:
                frames.append(self._plain[index].frame(completion.text))
                continue
            is_first = index not in self._has_begun
            self._has_begun.add(index)
            frames.append(frame(self._chunk(prompt_index, output, completion, is_first)))
            if self._is_plain and completion.finish_reason is None:
                text = dataclasses.replace(completion, text=TextFrames.TEXT)
                chunk = self._chunk(prompt_index, output, text, is_first=False)
                self._plain[index] = TextFrames(chunk)
        self._num_unfinished -= output.finished
        if not self._num_unfinished:
            if self._options.include_usage:
                frames.append(frame({**self._head, "choices": [], "usage": self._usage()}))
            frames.append(DONE)
        return "".join(frames)

    def _count(self, prompt_index: int, output: RequestOutput) -> None:
        self._num_prompt[prompt_index] = len(output.prompt_token_ids)
        self._num_cached[prompt_index] = output.num_cached_tokens
        if self._keeps_output:
            self._num_output += sum(len(c.token_ids) for c in output.outputs)
        if self._n > 1 and output.prompt_logprobs is not None:
            self._prompt_logprobs[prompt_index] = output.prompt_logprobs

    def _chunk(
        self, prompt_index: int, output: RequestOutput, completion: CompletionOutput, is_first: bool
    ) -> dict[str, Any]:
        choice = self._choice(prompt_index, output, completion, is_first)
        chunk = {**self._head, "choices": [choice]}
        return {**chunk, "usage": self._usage()} if self._options.with_each_chunk else chunk

    def _usage(self) -> dict[str, Any]:
        cached = sum(self._num_cached.values())
        return usage(sum(self._num_prompt.values()), self._num_output, cached)

    def _choice(
        self,
        prompt_index: int,
        output: RequestOutput,
        completion: CompletionOutput,
        is_first: bool = True,
    ) -> dict[str, Any]:
        """Return a continuation or, unless `is_first`, what is new of it."""
        body = self._body
        index = prompt_index * self._n + completion.index
        text, tokens = (completion.text, completion.token_ids) if self._keeps_output else ("", [])
        of_prompt = None
        if is_first:
            of_prompt = output.prompt_logprobs or self._prompt_logprobs.get(prompt_index)
        with_prompt_ids = body.return_token_ids and is_first
        echo = ""
        if body.echo and is_first:
            echo = output.prompt or self._decode(output.prompt_token_ids)
        choice: dict[str, Any] = {
            "index": index,
            "text": echo + text,
            "logprobs": None,
            "finish_reason": completion.finish_reason if self._keeps_output else "length",
            "stop_reason": completion.stop_reason,
            "token_ids": tokens if body.return_token_ids else None,
            "prompt_token_ids": output.prompt_token_ids if with_prompt_ids else None,
            "prompt_logprobs": None if body.prompt_logprobs is None else of_prompt,
        }
        if body.logprobs is not None:
            found: list[TokenLogprobs] = []
            if self._keeps_output:
                found += completion.logprobs or []
            offsets = self._offsets(index, tokens, len(echo))
            if body.echo and is_first:
                offsets = self._prompt_offsets(output.prompt_token_ids, len(echo)) + offsets
                tokens = output.prompt_token_ids + tokens
                found = (of_prompt or []) + found
            choice["logprobs"] = self._logprobs(tokens, found, offsets)
        return choice

    def _offsets(self, index: int, token_ids: list[int], num_chars: int) -> list[int]:
        """Return where new tokens begin in the text; `num_chars` precede the first of all."""
        if index not in self._texts:
            self._texts[index] = num_chars, self._make_detokenizer(self._params)
        start, detokenizer = self._texts[index]
        return [start + place for place in _places(detokenizer, token_ids)]

    def _prompt_offsets(self, token_ids: list[int], num_chars: int) -> list[int]:
        """Return where the tokens of a prompt begin in its text, which has so many characters.

        Both end together. The first tokens may have no text, as that of a tokenizer's beginning of
        sequence; and of a prompt that was cut only the last tokens are there.
        """
        params = self._params.clone(skip_special_tokens=False, spaces_between_special_tokens=True)
        detokenizer = self._make_detokenizer(params)
        places = _places(detokenizer, token_ids)
        if detokenizer is None:
            return places
        detokenizer.finish(search=False)
        return [max(0, place + num_chars - detokenizer.num_chars) for place in places]

    def _logprobs(
        self, tokens: Seq[int], found: Seq[TokenLogprobs], offsets: list[int]
    ) -> dict[str, Any]:
        """Return the log-probabilities of tokens, which begin in the text at `offsets`.

        That of a hidden stop string begins at the end of the text or after it.
        """
        chosen: list[float | None] = []
        top: list[dict[str, float] | None] = []
        for token, entries in zip(tokens, found, strict=True):
            if entries is None:
                chosen.append(None)
                top.append(None)
                continue
            tops: dict[str, float] = {}
            for other, entry in entries.items():
                logprob = max(entry.logprob, generation.LEAST_LOGPROB)
                tops.setdefault(self._token_text(other, entries), logprob)
            chosen.append(entries[token].logprob)
            top.append(tops)
        texts = [self._token_text(*each) for each in zip(tokens, found, strict=True)]
        lists = {"token_logprobs": chosen, "top_logprobs": top, "text_offset": offsets}
        return {"tokens": texts, **lists}

    def _token_text(self, token: int, entries: TokenLogprobs) -> str:
        if self._body.return_tokens_as_token_ids:
            return f"token_id:{token}"
        return self._decode([token]) if entries is None else entries[token].decoded_token or ""

    def _decode(self, token_ids: Seq[int]) -> str:
        if self._tokenizer is None:
            return ""
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=False))


def _places(detokenizer: Detokenizer | None, token_ids: Seq[int]) -> list[int]:
    """Return where each of the next tokens begins in a text; a character's tokens begin with it."""
    places = []
    for token_id in token_ids:
        places.append(0 if detokenizer is None else detokenizer.num_chars)
        if detokenizer is not None:
            detokenizer.add(token_id, search=False)
    return places
