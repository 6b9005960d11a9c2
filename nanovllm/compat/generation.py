"""`AsyncLLM` as vLLM's scripts use it: what `generate` returns can be awaited or iterated."""

from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Callable,
    Coroutine,
    Generator,
    Iterable,
)
from typing import Any

from nanovllm import async_llm
from nanovllm.compat.advice import VLLMNames, takes_other_keywords
from nanovllm.compat.engine_args import EngineArgs, asked_for
from nanovllm.compat.llm_engine import with_output_kind
from nanovllm.engine.prompt import PromptInput
from nanovllm.errors import NanoVLLMError
from nanovllm.options.lora_request import LoRARequest
from nanovllm.options.sampling_params import SamplingParams
from nanovllm.outputs import RequestOutput


class Generation(Coroutine[Any, Any, RequestOutput], AsyncIterator[RequestOutput]):
    """A request that starts when it is awaited or iterated.

    `await` gives the whole output, and `async for` an output for each step, as in vLLM. It is a
    coroutine, so `asyncio.create_task` takes it.

    Args:
        whole: starts the request, and waits for its whole output.
        steps: starts the request, and yields an output for each step.
    """

    def __init__(
        self,
        whole: Callable[[], Coroutine[Any, Any, RequestOutput]],
        steps: Callable[[], AsyncGenerator[RequestOutput, None]],
    ) -> None:
        self._start_whole, self._start_steps = whole, steps
        self._whole: Coroutine[Any, Any, RequestOutput] | None = None
        self._steps: AsyncGenerator[RequestOutput, None] | None = None

    def __await__(self) -> Generator[Any, Any, RequestOutput]:
        return self._coroutine().__await__()

    async def __anext__(self) -> RequestOutput:
        if self._whole is not None:
            raise NanoVLLMError("this generate() was awaited already: call it again to iterate it")
        if self._steps is None:
            self._steps = self._start_steps()
        return await anext(self._steps)

    async def aclose(self) -> None:
        """Abort the request that is being iterated."""
        if self._steps is not None:
            await self._steps.aclose()
        self.close()

    def send(self, value: Any) -> Any:
        """Go on, for the event loop; as any coroutine."""
        return self._coroutine().send(value)

    def throw(self, *error: Any) -> Any:
        """Raise an error where it waits, for the event loop; as any coroutine."""
        return self._coroutine().throw(*error)

    def close(self) -> None:
        """Abort the request that is being awaited."""
        if self._whole is not None:
            self._whole.close()

    def _coroutine(self) -> Coroutine[Any, Any, RequestOutput]:
        if self._steps is not None:
            raise NanoVLLMError("this generate() was iterated already: call it again to await it")
        if self._whole is None:
            self._whole = self._start_whole()
        return self._whole


class AsyncLLM(VLLMNames, async_llm.AsyncLLM):
    """A model that many asyncio tasks use at once; their requests share the engine's batches.

    Arguments and errors are those of its base class.
    """

    def __init__(self, model: str, **options: Any) -> None:
        super().__init__(model, **asked_for(options))

    chat = takes_other_keywords(async_llm.AsyncLLM.chat)

    @classmethod
    @takes_other_keywords
    def from_engine_args(cls, engine_args: EngineArgs) -> "AsyncLLM":
        """Return `AsyncLLM(**options)` with these options, as in vLLM.

        Raises:
            NanoVLLMError: as `LLM`.
        """
        return cls(**vars(engine_args))

    @takes_other_keywords
    def generate(
        self,
        prompt: PromptInput,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        user: str | None = None,
        lora_request: LoRARequest | None = None,
    ) -> Generation:
        """Generate for one prompt: `await` gives the whole output, `async for` one for each step.

        An iterated output holds all so far, unless output_kind asks for something else; `stream`
        gives deltas.
        """
        whole, stream = super().generate, self.stream
        params = with_output_kind(sampling_params)
        options: dict[str, Any] = {"priority": priority, "user": user, "lora_request": lora_request}
        return Generation(
            lambda: whole(prompt, sampling_params, request_id, **options),
            lambda: stream(prompt, params, request_id, **options),
        )

    @takes_other_keywords
    async def abort(self, request_id: int | str | Iterable[int | str]) -> None:
        """End a request, or each of several; ids that are not running do nothing."""
        many = [request_id] if isinstance(request_id, int | str) else list(request_id)
        for each in many:
            await super().abort(each)
