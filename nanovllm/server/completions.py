"""POST /v1/completions: continues texts or token ids, with echo and log-probabilities.

Knows no queue and no connection: `generation` does.
"""

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence as Seq
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from nanovllm.outputs import CompletionOutput, Logprob, RequestOutput
from nanovllm.sampling_params import SamplingParams
from nanovllm.server import generation
from nanovllm.server.errors import naming_params
from nanovllm.server.json_route import JSONRoute
from nanovllm.server.params import check_logprobs, sampling_params, structured_names
from nanovllm.server.protocol.common import Usage, usage
from nanovllm.server.protocol.completions import (
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    CompletionRequest,
)
from nanovllm.server.sse import json_response, sse
from nanovllm.server.state import ServerState, state_of

MAX_TOKENS = 16
"""max_tokens if the request gives none, as OpenAI's."""

router = APIRouter(tags=["completions"], route_class=JSONRoute)

TokenLogprobs = Mapping[int, Logprob] | None
"""Log-probabilities at one position, the position's own token first; None for the first one."""


@router.post("/v1/completions", response_model=Completion)
async def complete(request: Request, body: CompletionRequest) -> Response:
    """Continue one prompt or many."""
    server = state_of(request)
    server.check_model(body.model)
    answer = _Answer(server, body)
    with naming_params(CompletionRequest.model_fields, "prompt", structured_names(body)):
        prompts, params = _prompts(server, body), _params(server, body)
        check_logprobs(server, params, map(len, prompts))
        with generation.admitted(request, params.n * len(prompts), body.user) as place:
            outputs = generation.run_all(
                place,
                [generation.salted(prompt, body.cache_salt) for prompt in prompts],
                params,
                stream=bool(body.stream),
                priority=server.check_priority(body.priority),
            )
            if body.stream:
                return sse(answer.chunks(await generation.started(outputs)))
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
            server.llm.engine.input_processor.check_length("the prompt", prompt)
    return list(given)


def _params(server: ServerState, body: CompletionRequest) -> SamplingParams:
    changes: dict[str, Any] = {}
    if body.max_tokens == 0 and body.echo:  # only the prompt is wanted: its output is left out
        changes |= {"max_tokens": 1, "min_tokens": 0}
    if body.echo and body.prompt_logprobs is None:
        changes["prompt_logprobs"] = body.logprobs
    defaults = server.llm.get_default_sampling_params()
    return sampling_params(
        body, defaults, default_max_tokens=MAX_TOKENS, logprobs=body.logprobs, **changes
    )


class _Answer:
    """Puts the outputs of one request into the protocol's form."""

    def __init__(self, server: ServerState, body: CompletionRequest) -> None:
        self._body = body
        self._tokenizer: Any = server.llm.engine.input_processor.tokenizer
        self._n = body.n or 1
        self.may_be_large = body.logprobs is not None or body.prompt_logprobs is not None
        """Whether to make the whole answer takes so long that a thread does it."""
        self._keeps_output = not (body.echo and body.max_tokens == 0)
        self._head: dict[str, Any] = {
            "id": f"cmpl-{body.request_id or uuid.uuid4().hex}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": server.model_name,
            "system_fingerprint": server.fingerprint,
        }
        self._num_prompt: dict[int, int] = {}  # tokens, by prompt
        self._num_cached: dict[int, int] = {}
        self._num_output = 0
        self._offsets: dict[int, int] = {}  # by choice: where the next token's text begins

    async def whole(self, outputs: AsyncIterator[tuple[int, RequestOutput]]) -> Completion:
        """Return the whole answer."""
        choices: list[CompletionChoice] = []
        async for prompt_index, output in outputs:
            self._count(prompt_index, output)
            if self.may_be_large:
                choices += await asyncio.to_thread(self._choices, prompt_index, output)
            else:
                choices += self._choices(prompt_index, output)
        choices.sort(key=lambda choice: choice.index)
        return Completion(**self._head, choices=choices, usage=self._usage())

    async def chunks(
        self, outputs: AsyncIterator[tuple[int, RequestOutput]]
    ) -> AsyncGenerator[Completion | str, None]:
        """Yield a chunk for what is new of each continuation; the usage at the end if asked for."""
        options = self._body.stream_options
        has_begun: set[int] = set()
        async for prompt_index, output in outputs:
            self._count(prompt_index, output)
            for completion in output.outputs:
                choice = self._choice(prompt_index, output, completion, has_begun)
                chunk = Completion(**self._head, choices=[choice])
                if options is not None and options.continuous_usage_stats:
                    chunk.usage = self._usage()
                yield chunk
        if options is not None and options.include_usage:
            yield Completion(**self._head, choices=[], usage=self._usage())

    def _count(self, prompt_index: int, output: RequestOutput) -> None:
        self._num_prompt[prompt_index] = len(output.prompt_token_ids)
        self._num_cached[prompt_index] = output.num_cached_tokens
        if self._keeps_output:
            self._num_output += sum(len(c.token_ids) for c in output.outputs)

    def _usage(self) -> Usage:
        cached = sum(self._num_cached.values())
        return usage(sum(self._num_prompt.values()), self._num_output, cached)

    def _choices(self, prompt_index: int, output: RequestOutput) -> list[CompletionChoice]:
        return [self._choice(prompt_index, output, c) for c in output.outputs]

    def _choice(
        self,
        prompt_index: int,
        output: RequestOutput,
        completion: CompletionOutput,
        has_begun: set[int] | None = None,
    ) -> CompletionChoice:
        """Return a continuation, or what is new of it.

        Args:
            has_begun: indices of the choices that were sent before, for a stream.
        """
        body, index = self._body, prompt_index * self._n + completion.index
        is_first = has_begun is None or index not in has_begun
        if has_begun is not None:
            has_begun.add(index)
        text, tokens = (completion.text, completion.token_ids) if self._keeps_output else ("", [])
        fields: dict[str, Any] = {}
        if body.return_token_ids:
            fields["token_ids"] = tokens
            if is_first:
                fields["prompt_token_ids"] = output.prompt_token_ids
        if body.prompt_logprobs is not None and output.prompt_logprobs is not None:
            fields["prompt_logprobs"] = output.prompt_logprobs
        prompt_text = ""
        if body.echo and is_first:
            prompt_text = output.prompt or self._decode(output.prompt_token_ids)
        return CompletionChoice(
            index=index,
            text=prompt_text + text,
            logprobs=self._logprobs(index, output, completion),
            finish_reason=completion.finish_reason if self._keeps_output else "length",
            stop_reason=completion.stop_reason,
            **fields,
        )

    def _logprobs(
        self, index: int, output: RequestOutput, completion: CompletionOutput
    ) -> CompletionLogprobs | None:
        if self._body.logprobs is None:
            return None
        tokens: list[int] = []
        found: list[TokenLogprobs] = []
        if self._body.echo:
            tokens += output.prompt_token_ids
            found += output.prompt_logprobs or []
        if self._keeps_output:
            tokens += completion.token_ids
            found += completion.logprobs or []
        return self._protocol_logprobs(index, tokens, found)

    def _protocol_logprobs(
        self, index: int, tokens: Seq[int], found: Seq[TokenLogprobs]
    ) -> CompletionLogprobs:
        logprobs = CompletionLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
        offset = self._offsets.get(index, 0)
        for token, entries in zip(tokens, found, strict=True):
            text = self._token_text(token, entries)
            logprobs.tokens.append(text)
            logprobs.text_offset.append(offset)
            offset += len(text)
            if entries is None:
                logprobs.token_logprobs.append(None)
                logprobs.top_logprobs.append(None)
            else:
                tops: dict[str, float] = {}
                for other, entry in entries.items():
                    tops.setdefault(self._token_text(other, entries), entry.logprob)
                logprobs.token_logprobs.append(entries[token].logprob)
                logprobs.top_logprobs.append(tops)
        self._offsets[index] = offset
        return logprobs

    def _token_text(self, token: int, entries: TokenLogprobs) -> str:
        if self._body.return_tokens_as_token_ids:
            return f"token_id:{token}"
        return self._decode([token]) if entries is None else entries[token].decoded_token

    def _decode(self, token_ids: Seq[int]) -> str:
        if self._tokenizer is None:
            return ""
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=False))
