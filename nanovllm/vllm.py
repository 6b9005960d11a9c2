"""vLLM's names, for scripts written for it: `from nanovllm.vllm import LLM, SamplingParams`.

All names are here, whatever module of vLLM's has them. `LLM`, `AsyncLLM` and `EngineArgs` are
nanovllm's with the further keywords and methods of vLLM's.
"""

import argparse
import dataclasses
import gc
import inspect
from collections.abc import AsyncGenerator, Iterable
from typing import Any, NotRequired, Self, TypedDict, TypeVar

from nanovllm import async_llm, demo_model, llm
from nanovllm.engine import llm_engine
from nanovllm.engine.prompt import PromptInput as PromptType
from nanovllm.errors import InvalidRequestError
from nanovllm.factory import make_engine
from nanovllm.options.config import Config
from nanovllm.options.flags import (
    DashingParser as FlexibleArgumentParser,
    add_flags,
    add_other_flags,
    fields_of,
)
from nanovllm.options.lora_request import LoRARequest
from nanovllm.options.other_names import OTHER_NAMES
from nanovllm.options.pooling_params import PoolingParams
from nanovllm.options.sampling_params import RequestOutputKind, SamplingParams
from nanovllm.options.structured_outputs import StructuredOutputsParams
from nanovllm.options.validation import takes_other_keywords
from nanovllm.outputs import (
    CompletionOutput,
    Counter,
    EmbeddingRequestOutput,
    Gauge,
    Histogram,
    Metric,
    RequestOutput,
    ScoringRequestOutput,
    Vector,
)

__all__ = [
    "LLM",
    "AsyncEngineArgs",
    "AsyncLLM",
    "AsyncLLMEngine",
    "CompletionOutput",
    "Counter",
    "EmbeddingRequestOutput",
    "EngineArgs",
    "FlexibleArgumentParser",
    "Gauge",
    "Histogram",
    "LLMEngine",
    "LoRARequest",
    "Metric",
    "PoolingParams",
    "PromptType",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "ScoringRequestOutput",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
    "Vector",
    "cleanup_dist_env_and_memory",
]

Parser = TypeVar("Parser", bound="argparse._ActionsContainer")
Class = TypeVar("Class", bound=type)


def _as_vllm(cls: Class) -> Class:
    """Give a class `VllmX`, and its methods, the name X in errors: scripts know no other."""
    cls.__name__ = cls.__name__.removeprefix("Vllm")
    cls.__qualname__ = cls.__name__
    for method in vars(cls).values():
        if inspect.isfunction(method):
            inspect.unwrap(method).__qualname__ = f"{cls.__name__}.{method.__name__}"
    return cls


class EngineArgs(Config):
    """The fields of `Config`, with a default for the model. None is the default of any field.

    Raises:
        ConfigError: as `Config`.
    """

    def __init__(self, model: str | None = None, **options: Any) -> None:
        super().__init__(model=model or demo_model.default_model(), **_asked_for(options))

    def __setattr__(self, name: str, value: Any) -> None:
        """Change an option: vLLM's scripts do so."""
        changed = Config(**_asked_for({**_options(self), name: value}))
        if hasattr(changed, name):  # else it is an option of vLLM's that changes nothing
            object.__setattr__(self, name, getattr(changed, name))

    @staticmethod
    def add_cli_args(parser: Parser, **_: Any) -> Parser:
        """Add a flag for each option to a parser, or to a group of its arguments."""
        parser.add_argument("--model", default=demo_model.default_model(), help="The model.")
        add_flags(parser, Config, but={"model"})
        parser.set_defaults(
            **{name: field.default for name, field in fields_of(Config).items() if name != "model"}
        )
        add_other_flags(parser, default=None)
        return parser

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> Self:
        """Return the options in the arguments of `add_cli_args`."""
        names = [*(field.name for field in dataclasses.fields(Config)), *OTHER_NAMES["Config"]]
        return cls(**{name: getattr(args, name) for name in names if hasattr(args, name)})


@_as_vllm
class VllmLLM(llm.LLM):
    """`nanovllm.LLM` with the keywords and methods that only vLLM has.

    Arguments and errors are those of its base class; an option that is None asks for nothing.
    """

    def __init__(self, model: str, **options: Any) -> None:
        super().__init__(model, **_asked_for(options))

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> Self:
        """Return `LLM(**options)` with these options.

        Raises:
            NanoVLLMError: as `LLM`.
        """
        return cls(**_options(engine_args))

    def generate(
        self, prompts: Any = None, *args: Any, prompt_token_ids: Any = None, **options: Any
    ) -> list[RequestOutput]:
        """Generate for one prompt or many; return the outputs in the order of the prompts.

        Args:
            prompt_token_ids: token ids to use instead of `prompts`.
            args, options: as for `nanovllm.LLM.generate`.
        """
        if prompt_token_ids is not None:
            if prompts is not None:
                raise InvalidRequestError("give prompts or prompt_token_ids, not both")
            prompts = prompt_token_ids
        return super().generate(prompts, *args, **options)

    @property
    def llm_engine(self) -> "VllmLLMEngine":
        """The engine with vLLM's methods; unlike `LLM` it is for one thread at a time."""
        return VllmLLMEngine(self.engine)


@_as_vllm
class VllmAsyncLLM(async_llm.AsyncLLM):
    """`nanovllm.AsyncLLM` as vLLM's scripts use it: `generate` is iterated.

    Arguments and errors are those of its base class; an option that is None asks for nothing.
    """

    def __init__(self, model: str, **options: Any) -> None:
        super().__init__(model, **_asked_for(options))

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> Self:
        """Return `AsyncLLM(**options)` with these options.

        Raises:
            NanoVLLMError: as `LLM`.
        """
        return cls(**_options(engine_args))

    @takes_other_keywords
    def generate(  # type: ignore[override]  # which is awaited
        self,
        prompt: PromptType,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        user: str | None = None,
        lora_request: LoRARequest | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Generate for one prompt and yield an output for each step.

        An output holds all so far, unless output_kind asks for something else.
        """
        return self.stream(
            prompt,
            _with_output_kind(sampling_params),
            request_id,
            priority=priority,
            user=user,
            lora_request=lora_request,
        )


@_as_vllm
class VllmLLMEngine:
    """vLLM's view of an engine: the caller names requests, and `step` returns their outputs.

    One thread at a time may use it.

    Args:
        engine: the engine that does the work.
    """

    def __init__(self, engine: llm_engine.LLMEngine) -> None:
        self.engine = engine

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> Self:
        """Return an engine with these options, as `LLM(**options)` makes it.

        Raises:
            NanoVLLMError: as `LLM`.
        """
        return cls(make_engine(Config(**_options(engine_args))))

    @takes_other_keywords
    def add_request(
        self,
        request_id: str,
        prompt: PromptType,
        params: SamplingParams | None = None,
        arrival_time: float | None = None,
        lora_request: LoRARequest | None = None,
        *,
        priority: int = 0,
    ) -> str:
        """Queue a request under the caller's id; `step` returns its outputs.

        Args:
            params: an output holds all so far, unless output_kind asks for something else.
            arrival_time: not used; requests arrive when they are added.
            lora_request: the adapter; None is the model alone.
            priority: lower values go first.

        Raises:
            InvalidRequestError: the id is that of a running request, or the prompt or a parameter
                is invalid or unsupported.
            EngineDeadError: the engine is down.
        """
        self.engine.add_request(
            prompt,
            _with_output_kind(params),
            stream=True,
            priority=priority,
            lora_request=lora_request,
            request_id=request_id,
        )
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

    def abort_request(self, request_ids: str | Iterable[str]) -> None:
        """End requests; ids that are not running do nothing."""
        for request_id in [request_ids] if isinstance(request_ids, str) else request_ids:
            self.engine.abort(request_id)

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


# In a script they have vLLM's names:
LLM = VllmLLM
AsyncLLM = VllmAsyncLLM
AsyncLLMEngine = VllmAsyncLLM
AsyncEngineArgs = EngineArgs
LLMEngine = VllmLLMEngine


class TextPrompt(TypedDict):
    """A prompt of text."""

    prompt: str
    multi_modal_data: NotRequired[dict[str, Any]]
    mm_processor_kwargs: NotRequired[dict[str, Any]]
    multi_modal_uuids: NotRequired[dict[str, Any]]
    cache_salt: NotRequired[str]


class TokensPrompt(TypedDict):
    """A prompt of token ids, with its text if the output is to show it."""

    prompt_token_ids: list[int]
    prompt: NotRequired[str]
    multi_modal_data: NotRequired[dict[str, Any]]
    mm_processor_kwargs: NotRequired[dict[str, Any]]
    multi_modal_uuids: NotRequired[dict[str, Any]]
    cache_salt: NotRequired[str]


def cleanup_dist_env_and_memory(shutdown_ray: bool = False) -> None:
    """Free engines that nothing refers to any more."""
    gc.collect()


def _asked_for(options: dict[str, Any]) -> dict[str, Any]:
    """Return options without the fields of `Config` that are None, which ask for nothing."""
    fields = {field.name for field in dataclasses.fields(Config)}
    return {k: value for k, value in options.items() if value is not None or k not in fields}


def _options(engine_args: EngineArgs) -> dict[str, Any]:
    """Return the options by name."""
    return {field.name: getattr(engine_args, field.name) for field in dataclasses.fields(Config)}


def _with_output_kind(params: SamplingParams | None) -> SamplingParams | None:
    """Return parameters whose outputs hold all so far, as vLLM's do, if they do not say."""
    if params is None:
        return SamplingParams(output_kind=RequestOutputKind.CUMULATIVE)
    if isinstance(params, SamplingParams) and params.output_kind is None:
        return params.clone(output_kind=RequestOutputKind.CUMULATIVE)
    return params
