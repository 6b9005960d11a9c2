"""`LLM` with the methods and keywords that only nano-vllm's and vLLM's scripts use.

Decides nothing: the engine and its sharing among threads are those of the base class.
"""

from typing import Any

from nanovllm import llm
from nanovllm.compat.advice import VLLMNames, takes_other_keywords
from nanovllm.compat.engine_args import EngineArgs, asked_for
from nanovllm.compat.llm_engine import LLMEngine
from nanovllm.engine.prompt import PromptInput, as_list
from nanovllm.errors import InvalidRequestError
from nanovllm.options.lora_request import LoRARequest
from nanovllm.options.sampling_params import SamplingParams
from nanovllm.outputs import RequestOutput


class LLM(VLLMNames, llm.LLM):
    """A model that is loaded and ready to generate.

    Beside its own methods it has nano-vllm's loop of `add_request` and `step`, and vLLM's engine.
    Arguments and errors are those of its base class.
    """

    def __init__(self, model: str, **options: Any) -> None:
        super().__init__(model, **asked_for(options))

    chat = takes_other_keywords(llm.LLM.chat)
    exit = llm.LLM.shutdown

    @classmethod
    @takes_other_keywords
    def from_engine_args(cls, engine_args: EngineArgs) -> "LLM":
        """Return `LLM(**options)` with these options, as in vLLM.

        Raises:
            NanoVLLMError: as `LLM`.
        """
        return cls(**vars(engine_args))

    @takes_other_keywords
    def generate(
        self, prompts: Any = None, *args: Any, prompt_token_ids: Any = None, **options: Any
    ) -> list[RequestOutput]:
        """Generate for one prompt or many; return the outputs in the order of the prompts.

        Args:
            prompt_token_ids: token ids to use instead of `prompts`.
            args, options: as for `nanovllm.llm.LLM.generate`.
        """
        if prompt_token_ids is not None:
            if prompts is not None:
                raise InvalidRequestError("give prompts or prompt_token_ids, not both")
            prompts = [{"prompt_token_ids": ids} for ids in as_list(prompt_token_ids)]
        return super().generate(prompts, *args, **options)

    @property
    def llm_engine(self) -> LLMEngine:
        """The engine with vLLM's methods; unlike `LLM` it is for one thread at a time."""
        return LLMEngine(self.engine)

    def add_request(
        self,
        prompt: PromptInput,
        sampling_params: SamplingParams | None = None,
        *others: None,
        priority: int | None = 0,
        lora_request: LoRARequest | None = None,
    ) -> int | str:
        """Queue a request whose output `step` returns, as in nano-vllm; return its id.

        Args:
            priority, lora_request: as for `generate`.

        Raises:
            InvalidRequestError: the prompt or a parameter is invalid or unsupported, or n is not 1.
            EngineDeadError: the engine is down.
        """
        if others or isinstance(sampling_params, str):
            raise InvalidRequestError(
                "LLM has nano-vllm's add_request(prompt, sampling_params); llm.llm_engine has "
                "vLLM's add_request(request_id, prompt, params)"
            )
        if sampling_params is not None and getattr(sampling_params, "n", 1) != 1:
            raise InvalidRequestError(
                f"step() returns one continuation of a request, so n must be 1, "
                f"got {sampling_params.n}: use generate()"
            )
        request = self.engine.input_processor.make_request(
            prompt, sampling_params, priority=priority, lora_request=lora_request
        )
        self._shared.call(lambda: self.engine.queue(request))
        return request.request_id

    def step(self) -> tuple[list[tuple[int | str, list[int]]], int]:
        """Run one step and return what it finished of `add_request`, as in nano-vllm.

        Returns:
            (request id, output tokens) of each request that is finished; and the number of prompt
            tokens that the step computed or, if it computed none, minus that of its output tokens.
        """

        def step() -> tuple[list[tuple[int | str, list[int]]], int]:
            stats = self.engine.stats
            prefill, decode = stats.num_prefill_tokens, stats.num_decode_tokens
            outputs = [(output.request_id, output.token_ids) for output in self.engine.step()]
            num_prefill = stats.num_prefill_tokens - prefill
            return outputs, num_prefill or decode - stats.num_decode_tokens

        return self._shared.call(step)

    def is_finished(self) -> bool:
        """Whether no request is unfinished, and `step` has returned every output."""
        return self._shared.call(self.engine.is_finished)
