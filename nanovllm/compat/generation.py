"""`Generation`: what `AsyncLLM.generate` returns, to be awaited or iterated.

Knows no engine.
"""

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Generator
from typing import Any

from nanovllm.errors import NanoVLLMError
from nanovllm.options.sampling_params import RequestOutputKind, SamplingParams
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


def with_output_kind(params: SamplingParams | None) -> SamplingParams | None:
    """Return parameters whose outputs hold all so far, as vLLM's do, if they do not say."""
    if params is None:
        return SamplingParams(output_kind=RequestOutputKind.CUMULATIVE)
    if isinstance(params, SamplingParams) and params.output_kind is None:
        return params.clone(output_kind=RequestOutputKind.CUMULATIVE)
    return params
