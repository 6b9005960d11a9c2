"""`LLMEngine` with vLLM's methods, for scripts that add requests and run the steps themselves.

One thread at a time may use it. It decides nothing: nanovllm's own engine does the work.
"""

from collections.abc import Iterable
from typing import Any

from nanovllm.assembly import make_engine
from nanovllm.compat.advice import VLLMNames, takes_other_keywords
from nanovllm.compat.engine_args import EngineArgs
from nanovllm.engine import llm_engine
from nanovllm.engine.prompt import PromptInput
from nanovllm.options.config import Config
from nanovllm.options.sampling_params import RequestOutputKind, SamplingParams
from nanovllm.outputs import Histogram, Metric, RequestOutput, Vector


class LLMEngine(VLLMNames):
    """vLLM's view of an engine: the caller names requests, and `step` returns their outputs.

    Args:
        engine: the engine that does the work; its threads and memory are shared with it.
    """

    def __init__(self, engine: llm_engine.LLMEngine) -> None:
        self.engine = engine

    @classmethod
    @takes_other_keywords
    def from_engine_args(cls, engine_args: EngineArgs) -> "LLMEngine":
        """Return an engine with these options, as `LLM(**options)` makes it.

        Raises:
            NanoVLLMError: as `LLM`.
        """
        return cls(make_engine(Config(**vars(engine_args))))

    @takes_other_keywords
    def add_request(
        self,
        request_id: str,
        prompt: PromptInput,
        params: SamplingParams | None = None,
        arrival_time: float | None = None,
        lora_request: Any = None,
        *,
        priority: int = 0,
    ) -> str:
        """Queue a request under the caller's id; `step` returns its outputs.

        Args:
            params: an output holds all so far, unless output_kind asks for something else.
            arrival_time: not used; requests arrive when they are added.
            lora_request: the adapter, a `LoRARequest`; None: the model alone.
            priority: lower values go first.

        Raises:
            InvalidRequestError: the id is that of a running request, or the prompt or a parameter
                is invalid or unsupported.
            EngineDeadError: the engine is down.
        """
        params = with_output_kind(params)
        options = {"priority": priority, "lora_request": lora_request, "request_id": request_id}
        self.engine.add_request(prompt, params, stream=True, **options)
        return request_id

    def step(self) -> list[RequestOutput]:
        """Run one step and return an output of each request that has something new."""
        return self.engine.step()

    def has_unfinished_requests(self) -> bool:
        """Whether a request is unfinished, or an output waits for `step` to return it."""
        return not self.engine.is_finished()

    def get_num_unfinished_requests(self) -> int:
        """Return the number of sequences that are not finished."""
        return self.engine.scheduler.num_unfinished

    @takes_other_keywords
    def abort_request(self, request_ids: str | Iterable[str]) -> None:
        """End requests; ids that are not running do nothing."""
        for request_id in [request_ids] if isinstance(request_ids, str) else request_ids:
            self.engine.abort(request_id)

    @takes_other_keywords
    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """Forget all cached prefixes; return False, and forget none, while requests run.

        Args:
            reset_running_requests: not used; running requests keep their blocks.
        """
        return self.engine.reset_prefix_cache()

    def get_metrics(self) -> list[Metric | Vector | Histogram]:
        """Return the engine's counts and its load now."""
        return self.engine.get_metrics()

    def get_tokenizer(self) -> Any:
        """Return the checkpoint's transformers tokenizer, None if it has none."""
        return self.engine.load_tokenizer()

    def shutdown(self) -> None:
        """End the workers and free the model. May be called again."""
        self.engine.shutdown()


def with_output_kind(params: SamplingParams | None) -> SamplingParams | None:
    """Return parameters whose outputs hold all so far, as vLLM's do, if they do not say."""
    if params is None:
        return SamplingParams(output_kind=RequestOutputKind.CUMULATIVE)
    if isinstance(params, SamplingParams) and params.output_kind is None:
        return params.clone(output_kind=RequestOutputKind.CUMULATIVE)
    return params
