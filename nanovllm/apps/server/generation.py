"""The one way from a checked request to the engine: parameters, admission, deadline, disconnect."""

import asyncio
import dataclasses
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence as Seq
from contextlib import ExitStack, aclosing, contextmanager, suppress
from functools import partial
from typing import Any, TypeVar

from fastapi import Request

from nanovllm.apps.server.admission import Guard
from nanovllm.apps.server.error_bodies import APIError
from nanovllm.apps.server.prometheus import RequestMeter
from nanovllm.apps.server.protocol import EngineRequest, GenerationRequest
from nanovllm.apps.server.request_log import record_of
from nanovllm.apps.server.state import ServerState, state_of
from nanovllm.engine.engine_thread import FairExecutor
from nanovllm.engine.input_processor import NO_OUTPUT
from nanovllm.engine.prompt import Prompt
from nanovllm.errors import InvalidRequestError
from nanovllm.options.lora_request import LoRARequest
from nanovllm.options.pooling_params import PoolingParams
from nanovllm.options.sampling_params import REQUESTS_FAULT, SamplingParams
from nanovllm.options.structured_outputs import UNFINISHED, StructuredOutputsParams
from nanovllm.outputs import RequestOutput

T = TypeVar("T")

LEAST_LOGPROB = -9999.0
"""In place of -inf, which JSON lacks; as in vLLM."""
MAX_ANSWER_LOGPROBS = 2**20
"""Log-probabilities of an answer. To make it takes some 250 bytes for each, in a chat 800."""

_FIELDS = [
    name
    for name in SamplingParams.__dataclass_fields__
    if name in GenerationRequest.model_fields and name != "structured_outputs"
]

_COMPILE_SECONDS = 10.0
"""For a grammar, with its wait for a thread. Compiling takes some 100 ms at most."""


@dataclasses.dataclass
class AdmittedRequest:
    """An admitted request's place in the server."""

    request: Request
    guard: Guard
    user: str | None
    priority: int
    lora_request: LoRARequest | None
    frames: Callable[[RequestOutput], str] | None = None
    """Makes what is sent for a delta of a stream of one prompt. While the stream waits, deltas go
    through it to the client at once, but for the first one and the last."""

    async def prepare(
        self, function: Callable[..., T], *args: Any, pool: FairExecutor | None = None
    ) -> T:
        """Run what takes a while before the engine has the request, when it is the user's turn.

        Args:
            pool: its threads; None are those for conversations.

        Raises:
            APIError: the time is over, or the client is gone; or what the function raises.
        """
        pool = pool or state_of(self.request).preparing
        with self.guard:
            return await asyncio.wrap_future(pool.submit(self.user or "", function, *args))


@contextmanager
def while_connected(request: Request) -> Iterator[None]:
    """Interrupt what waits in the block when the client goes away.

    Raises:
        APIError: the client is gone.
    """
    guard = Guard()
    watch = asyncio.create_task(guard.watch(request))
    try:
        with guard:
            yield
    finally:
        watch.cancel()


def admit(
    request: Request, num_sequences: int, body: EngineRequest | None = None
) -> AdmittedRequest:
    """Admit a request before anything is done for it, and watch its client and its deadline.

    Its place is free when the engine has ended its sequences, or else when its answer was sent.
    The key of fairness is its user or, with several API keys, its key.

    Raises:
        APIError: the engine sleeps or is paused, there is no such model, the priority is not
            allowed, the queue is full, or it holds too much of this user.
    """
    server = state_of(request)
    server.check_awake()
    guard = Guard()
    given = body or EngineRequest()
    adapter = server.check_model(given.model)
    priority = server.check_priority(given.priority)
    user = given.user
    if len(server.options.api_keys) > 1:  # a client with its own key cannot be many users
        user = str(request.state.key_digest)
    held: ExitStack = request.state.held
    held.push(guard.ends_quietly)
    held.enter_context(server.adapters.used(adapter))
    try:
        held.enter_context(server.admission.admit(guard, num_sequences, user or None))
    except APIError as error:
        server.metrics.refusals[error.body["error"]["code"] or "too_many_sequences"] += 1
        raise
    watch = asyncio.create_task(guard.watch(request))
    held.callback(watch.cancel)
    if server.options.request_timeout is not None:
        seconds = server.options.request_timeout
        late = APIError(
            504,
            f"the request took longer than request_timeout, {seconds:g} s: ask for fewer tokens, "
            "or try again when the server is less busy",
            code="request_timeout",
            headers={"x-should-retry": "false"},
        )
        timer = watch.get_loop().call_later(seconds, guard.end, late)
        held.callback(timer.cancel)
    return AdmittedRequest(request, guard, user, priority, adapter)


async def run(
    place: AdmittedRequest, prompt: Prompt, params: SamplingParams, *, stream: bool
) -> AsyncGenerator[RequestOutput, None]:
    """Generate for one prompt; return its deltas, or one whole output if `stream` is False.

    The first is waited for, so that its error is raised while the status can still be set. The
    request is aborted when the client goes away, and when the iterator is closed.

    Raises:
        APIError: the time is over, or the client is gone.
        InvalidRequestError: the prompt or a parameter is invalid or unsupported.
        EngineDeadError: the engine is down.
    """
    await _compile_grammar(place, params)
    return await _started(_outputs(place, await opened(place, prompt), params, stream))


async def run_all(
    place: AdmittedRequest, prompts: Seq[Prompt], params: SamplingParams, *, stream: bool
) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """Generate for many prompts as `run` does; return pairs of a prompt's index and an output."""
    await _compile_grammar(place, params)
    made = [_outputs(place, prompt, params, stream) for prompt in prompts]
    return await _started(_merged(made))


async def pool(
    place: AdmittedRequest, prompts: Seq[Prompt], params: Seq[PoolingParams], name: str = ""
) -> list[RequestOutput]:
    """Return the outputs for prompts that are pooled, in their order; errors are those of `run`.

    They call a prompt `name[index]`.
    """
    made = [_outputs(place, *each, False) for each in zip(prompts, params, strict=True)]
    found: dict[int, RequestOutput] = {}
    async with aclosing(_merged(made, name)) as outputs:
        async for index, output in outputs:
            found[index] = output
    return [found[index] for index in range(len(prompts))]


async def _merged(
    streams: Seq[AsyncGenerator[RequestOutput, None]], name: str = ""
) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    if len(streams) == 1:  # no task and no queue between
        async with aclosing(streams[0]) as outputs:
            async for output in outputs:
                yield 0, output
        return
    # One output a prompt at most waits here, so the engine merges those of a slow reader.
    ready: asyncio.Queue[tuple[int, RequestOutput | BaseException | None]] = asyncio.Queue(1)

    async def pump(index: int) -> None:
        end: BaseException | None = None
        try:
            async with aclosing(streams[index]) as outputs:
                async for output in outputs:
                    await ready.put((index, output))
        except InvalidRequestError as error:
            end = type(error)(f"{name}[{index}]: {error}") if name else error
        except Exception as error:
            end = error
        await ready.put((index, end))

    tasks = [asyncio.create_task(pump(index)) for index in range(len(streams))]
    num_running = len(tasks)
    try:
        while num_running:
            index, item = await ready.get()
            if isinstance(item, RequestOutput):
                yield index, item
            elif item is not None:
                raise item
            else:
                num_running -= 1
    finally:
        for task in tasks:
            task.cancel()
        with suppress(asyncio.CancelledError):
            await asyncio.gather(*tasks, return_exceptions=True)


async def opened(place: AdmittedRequest, prompt: Prompt) -> Prompt:
    """Return a prompt whose pictures are opened. Requests take turns with each picture."""
    server = state_of(place.request)
    for index in range(len(prompt.pictures)):
        open_picture = server.llm.engine.input_processor.open_picture
        prompt = await place.prepare(open_picture, prompt, index, pool=server.opening)
    return prompt


async def _compile_grammar(place: AdmittedRequest, params: SamplingParams) -> None:
    """Compile the request's grammar, so that the thread that makes requests finds it compiled."""
    server = state_of(place.request)
    form = params.structured_outputs
    if not isinstance(form, StructuredOutputsParams):
        return
    grammars = server.llm.engine.input_processor.grammars
    if grammars is None or grammars.is_compiled(form):
        return
    try:
        async with asyncio.timeout(_COMPILE_SECONDS):
            await place.prepare(grammars.compile, form, pool=server.compiling)
    except TimeoutError:
        raise APIError(
            503,
            f"{form.source} was not compiled within {_COMPILE_SECONDS:g} s: use a simpler one, "
            "or try again when the server is less busy",
            code="grammar_timeout",
            headers={"x-should-retry": "false"},
        ) from None


async def _outputs(
    place: AdmittedRequest, prompt: Prompt, params: SamplingParams | PoolingParams, stream: bool
) -> AsyncGenerator[RequestOutput, None]:
    server = state_of(place.request)
    guard = place.guard
    fair: dict[str, Any] = {"priority": place.priority, "user": place.user}
    fair["lora_request"] = place.lora_request
    counted = NO_OUTPUT if isinstance(params, PoolingParams) else params
    ended = partial(server.admission.engine_ended, guard, counted.n)
    with RequestMeter(server.metrics, counted, record_of(place.request.scope)) as meter:
        if not stream or isinstance(params, PoolingParams):
            with guard:
                output = await server.llm.generate(prompt, params, **fair)
            ended()
            meter.observe(output)
            yield _checked(output)
            return
        connection = place.request.scope["state"].get("connection")  # None behind other servers

        def take(delta: RequestOutput) -> bool:
            if not (place.frames and connection and connection.can_write) or delta.finished:
                return False
            meter.observe(delta)
            if text := place.frames(_checked(delta)):
                connection.write(text.encode())
            return True

        deltas = server.llm.stream(prompt, params, on_finished=ended, take=take, **fair)
        async with aclosing(deltas):
            finished = False
            while not finished:
                with guard:
                    delta = await anext(deltas)
                meter.observe(delta)
                yield _checked(delta)
                finished = delta.finished


def _checked(output: RequestOutput) -> RequestOutput:
    """Return an output; raise APIError if a continuation failed."""
    for completion in output.outputs:
        if completion.finish_reason == "error":
            reason = str(completion.stop_reason)
            if reason.startswith(UNFINISHED):
                raise APIError(400, f"{reason}; use another form, or a simpler one")
            status = 400 if reason.startswith(REQUESTS_FAULT) else 500
            raise APIError(status, f"the answer failed: {reason}")
    return output


async def _started(outputs: AsyncGenerator[T, None]) -> AsyncGenerator[T, None]:
    """Wait for the first of `outputs`, and return an iterator of all."""
    first = await anext(outputs)

    async def all_outputs() -> AsyncGenerator[T, None]:
        async with aclosing(outputs):
            yield first
            async for output in outputs:
                yield output

    return all_outputs()


def sampling_params(
    server: ServerState,
    given: GenerationRequest,
    *,
    default_max_tokens: int,
    logprobs: int | None,
    defaults: SamplingParams | None = None,
    **changes: Any,
) -> SamplingParams:
    """Return the parameters of a request: those given, and `defaults` for the others.

    All is checked that can be without the prompt, and without compiling a grammar.

    Args:
        default_max_tokens: max_tokens if the request gives none.
        defaults: None are the checkpoint's.
        changes: fields that the route decides.

    Raises:
        InvalidRequestError: a value is invalid.
    """
    fields = {name: value for name in _FIELDS if (value := getattr(given, name)) is not None}
    if forms := given.forms():
        (fields["structured_outputs"],) = forms.values()
    if given.vllm_xargs:
        fields["extra_args"] = given.vllm_xargs
    fields = {"max_tokens": default_max_tokens, **fields, "logprobs": logprobs, **changes}
    params = dataclasses.replace(defaults or server.llm.get_default_sampling_params(), **fields)
    server.llm.engine.input_processor.params_check.check(params)
    check_logprobs(server, params, [0])
    return params


def check_logprobs(server: ServerState, params: SamplingParams, lengths: Iterable[int]) -> None:
    """Refuse a request whose answer could have too many log-probabilities.

    Args:
        lengths: of the prompts, in tokens or, where they are not known yet, in characters.

    Raises:
        InvalidRequestError: there are too many.
    """
    longest = server.max_model_len
    limit = MAX_ANSWER_LOGPROBS
    of_prompt = num_logprobs(server, params.prompt_logprobs)
    of_output = num_logprobs(server, params.logprobs)
    most = longest * max(of_prompt, of_output)
    output = min(params.max_tokens, longest) * of_output
    total = params.n * sum(min(length * of_prompt + output, most) for length in lengths)
    if total > limit:
        name = "prompt_logprobs" if params.logprobs is None else "logprobs"
        raise InvalidRequestError(
            f"{name}: the answer could have {total} log-probabilities; the limit is {limit}: ask "
            "for fewer of each token, fewer tokens, prompts or continuations"
        )


def num_logprobs(server: ServerState, count: int | None) -> int:
    """Return how many log-probabilities a token has: its own, and the `count` most likely."""
    if count is None:
        return 0
    return (server.llm.engine.worker_info.vocab_size if count == -1 else count) + 1


def field_names(given: GenerationRequest) -> dict[str, str]:
    """Return, by the engine's names, the fields of a request that have other names."""
    field = next(iter(given.forms()), "structured_outputs")
    names = {"structured_outputs": field, "StructuredOutputsParams": field}
    return {**names, "extra_args": "vllm_xargs"}
