"""`LLM`: the methods `generate`, `chat`, `stream`, `embed` and `score`, for any number of threads.

They only wait for outputs: `EngineThread` runs the steps.
"""

import contextlib
import copy
import time
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence as Seq
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from nanovllm.control_api import WeightMethods
from nanovllm.engine.engine_thread import EngineThread, Result
from nanovllm.engine.llm_engine import run_logged
from nanovllm.engine.prompt import PromptInput
from nanovllm.engine.reader import Item, Mailbox
from nanovllm.engine.request import Request
from nanovllm.errors import InvalidRequestError, NanoVLLMError
from nanovllm.factory import make_engine
from nanovllm.options.config import Config
from nanovllm.options.lora_request import LoRARequest
from nanovllm.options.pooling_params import PoolingParams
from nanovllm.options.sampling_params import SamplingParams
from nanovllm.options.validation import takes_other_keywords
from nanovllm.outputs import (
    DraftCounts,
    EmbeddingRequestOutput,
    Histogram,
    Metric,
    RequestOutput,
    ScoringRequestOutput,
    Vector,
)

if TYPE_CHECKING:
    from nanovllm.chat.templates import Message
    from nanovllm.scheduler.scheduler import SchedulerStats


class LLM(WeightMethods):
    """A loaded model, ready to generate.

    Several threads may call its methods at once; their requests share the engine's batches.

    Args:
        model: a local checkpoint directory, a GGUF file, or a Hugging Face hub id.
        options: the fields of `Config`.

    Raises:
        ConfigError: an option is unknown or invalid.
        CheckpointError: the model cannot be found, read or run.
        OutOfMemoryError: the KV pool cannot hold one sequence of max_model_len tokens.
    """

    def __init__(self, model: str, **options: Any) -> None:
        self.engine = make_engine(Config(model=model, **options))
        self._thread = EngineThread(self.engine, "LLM")
        self._finalizer = weakref.finalize(self, self._thread.stop)

    @takes_other_keywords
    def generate(
        self,
        prompts: PromptInput | Seq[PromptInput],
        sampling_params: SamplingParams | Seq[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        priority: int | Seq[int | None] | None = 0,
        lora_request: LoRARequest | Seq[LoRARequest | None] | None = None,
    ) -> list[RequestOutput]:
        """Generate for one prompt or many; return the outputs in the order of the prompts.

        Args:
            prompts: a string, token ids, a dictionary, or a list of these. Token ids are a list, a
                numpy array or a torch tensor; two dimensions are a list of prompts.
            sampling_params: one for all prompts, or a list with one for each prompt; None means
                `SamplingParams()`.
            use_tqdm: show a progress bar with tokens per second.
            priority: one for all prompts, or a list with one for each; lower values go first.
                None means 0.
            lora_request: the LoRA adapter of all prompts, or a list with one or None for each; None
                means the base model.

        Raises:
            InvalidRequestError: a prompt or a parameter is invalid or unsupported; no request was
                queued.
            EngineDeadError: the engine is down.
        """
        processor = self._processor
        requests = processor.make_requests(prompts, sampling_params, priority, lora_request)
        return self._outputs(requests, use_tqdm)

    @takes_other_keywords
    def chat(
        self,
        messages: "Seq[Message] | Seq[Seq[Message]]",
        sampling_params: SamplingParams | Seq[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        priority: int | Seq[int | None] | None = 0,
        lora_request: LoRARequest | Seq[LoRARequest | None] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or many, each rendered by a chat template.

        Args:
            messages: one conversation (a list of messages), or a list of conversations. A
                message's content is a string or a list of text parts.
            sampling_params, use_tqdm, priority, lora_request: as for `generate`.
            add_generation_prompt: end the prompt with the start of the assistant's answer.
            continue_final_message: end the prompt inside the last message, so that the model
                continues it; with add_generation_prompt=False.
            tools: JSON schemas of the functions that the template describes to the model.
            chat_template: a Jinja template to use instead of the checkpoint's.
            chat_template_kwargs: further template arguments, such as {"enable_thinking": False}.

        Raises:
            InvalidRequestError: there is no chat template, or it cannot render the messages; or
                as for `generate`.
            EngineDeadError: the engine is down.
        """
        from nanovllm.chat.templates import as_conversations, template_options

        given = add_generation_prompt, continue_final_message, tools, chat_template
        options = template_options(*given, chat_template_kwargs)
        render = self._processor.render
        prompts = [render(conversation, options) for conversation in as_conversations(messages)]
        return self.generate(
            prompts, sampling_params, use_tqdm, priority=priority, lora_request=lora_request
        )

    @takes_other_keywords
    def embed(
        self,
        prompts: PromptInput | Seq[PromptInput],
        *,
        use_tqdm: bool = True,
        pooling_params: PoolingParams | Seq[PoolingParams] | None = None,
        priority: int | Seq[int | None] | None = 0,
        lora_request: LoRARequest | Seq[LoRARequest | None] | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """Return a vector for one prompt or many, in the order of the prompts.

        Args:
            prompts, use_tqdm, priority, lora_request: as for `generate`.
            pooling_params: one for all prompts, or a list with one for each; None means what the
                checkpoint says.

        Raises:
            InvalidRequestError: a prompt or a parameter is invalid or unsupported; no request was
                queued.
            CheckpointError: the checkpoint's files about vectors are invalid.
            EngineDeadError: the engine is down.
        """
        params = PoolingParams() if pooling_params is None else pooling_params
        processor = self._processor
        requests = processor.make_requests(prompts, params, priority, lora_request)
        return list(map(processor.pooling.embedding, self._outputs(requests, use_tqdm)))

    @takes_other_keywords
    def score(
        self,
        data_1: str | Seq[str],
        data_2: str | Seq[str],
        /,
        *,
        use_tqdm: bool = True,
        pooling_params: PoolingParams | None = None,
        instruction: str | None = None,
        priority: int | None = 0,
        lora_request: LoRARequest | None = None,
    ) -> list[ScoringRequestOutput]:
        """Return how well pairs of texts fit, by a reranker or by the similarity of their vectors.

        Args:
            data_1: a query or a list of them: one for all of data_2, or one for each.
            data_2: a document, or a list of them.
            use_tqdm, priority, lora_request: as for `generate`.
            pooling_params: how the vectors are made; None means what the checkpoint says, with its
                prompts for queries and documents.
            instruction: for rerankers: what a document must do for its query.

        Raises:
            InvalidRequestError, CheckpointError, EngineDeadError: as for `embed`.
        """
        processor = self._processor
        scoring = processor.pooling.scoring(data_1, data_2, pooling_params, instruction)
        requests = processor.make_requests(scoring.prompts, scoring.params, priority, lora_request)
        return scoring.results(self._outputs(requests, use_tqdm))

    def stream(
        self,
        prompt: PromptInput,
        sampling_params: SamplingParams | None = None,
        *,
        priority: int | None = 0,
        lora_request: LoRARequest | None = None,
    ) -> Iterator[RequestOutput]:
        """Generate for one prompt and yield the delta of each step.

        Joined, the texts, token ids and logprobs of the deltas are those that `generate` returns.
        Closing the iterator aborts the request.

        Raises:
            InvalidRequestError: the prompt or a parameter is invalid or unsupported. This call
                raises it, not the iterator.
            EngineDeadError: the engine is down.
        """
        request = self._processor.make_request(
            prompt, sampling_params, priority=priority, lora_request=lora_request, stream=True
        )
        return self._run_requests([request])

    def add_request(
        self,
        prompt: PromptInput,
        sampling_params: SamplingParams | None = None,
        *,
        priority: int | None = 0,
        lora_request: LoRARequest | None = None,
    ) -> int | str:
        """Queue a request whose output `step` returns, as in nano-vllm; return its id.

        Args:
            prompt, sampling_params, priority, lora_request: as for `stream`.

        Raises:
            InvalidRequestError: the prompt or a parameter is invalid or unsupported, or n is not 1.
            EngineDeadError: the engine is down.
        """
        request = self._processor.make_request(
            prompt, sampling_params, priority=priority, lora_request=lora_request
        )
        if request.params.n != 1:
            raise InvalidRequestError(
                "step() returns one continuation of a request, so n must be 1, "
                f"got {request.params.n}: use generate()"
            )
        self._call(lambda: self.engine.queue(request))
        return request.request_id

    def step(self) -> tuple[list[tuple[int | str, list[int]]], int]:
        """Run one step and return the requests of `add_request` that it finished, as in nano-vllm.

        Returns:
            (request id, output tokens) of each finished request; and the number of tokens that the
            step computed and that gave no output or, if there are none, minus that of its outputs.

        Raises:
            EngineDeadError: the engine is down.
        """

        def step() -> int:
            stats = self.engine.stats
            num_prefill = stats.num_prefill_tokens
            num_decode = stats.num_decode_tokens
            self.engine.run_step()
            return stats.num_prefill_tokens - num_prefill or num_decode - stats.num_decode_tokens

        num_tokens = self._call(step)
        # Taken here: after Ctrl-C the next call returns them.
        outputs = self.engine.take_outputs()
        return [(output.request_id, output.token_ids) for output in outputs], num_tokens

    def is_finished(self) -> bool:
        """Return whether every request is finished and `step` has returned every output."""
        return self._call(self.engine.is_finished)

    def abort(self, request_id: int | str) -> RequestOutput | None:
        """End a request and return its output not yet delivered; None if it is not running."""
        return self._call(lambda: self.engine.abort(request_id))

    def get_metrics(self) -> list[Metric | Vector | Histogram]:
        """Return the engine's counts and rates, under vLLM's names where vLLM has them."""
        return self._call(self.engine.get_metrics)

    def _outputs(self, requests: Seq[Request], use_tqdm: bool) -> list[RequestOutput]:
        """Run requests; return their outputs in the same order."""
        stats = self.engine.stats
        before = copy.copy(stats)  # the steps begin in _run_requests()
        start = time.perf_counter()
        try:
            with contextlib.closing(self._run_requests(requests)) as arriving:
                outputs: Iterator[RequestOutput] = arriving
                if use_tqdm and requests:
                    outputs = _with_progress(arriving, len(requests), stats, before, start)
                by_id = {output.request_id: output for output in outputs}
        except BaseException:
            with contextlib.suppress(NanoVLLMError):
                self._call(lambda: None)  # by then the requests have ended
            raise
        return [by_id[request.request_id] for request in requests]

    def _run_requests(self, requests: Seq[Request]) -> Generator[RequestOutput, None, None]:
        """Queue requests; return a generator of their outputs. Closing it aborts the rest.

        Raises:
            NanoVLLMError: as `EngineThread.submit` and `start_request`.
        """
        outputs = self._outputs_of(requests)
        next(outputs)  # queue them, inside its try block
        return outputs

    def _outputs_of(self, requests: Seq[Request]) -> Generator[Any, None, None]:
        """Queue requests, yield None once, then yield their outputs as they come."""
        arriving: SimpleQueue[Item] = SimpleQueue()
        unfinished = {request.request_id: Mailbox(arriving.put) for request in requests}
        thread = self._thread

        def start() -> None:
            for request in requests:
                thread.start_request(unfinished[request.request_id], request)

        def end() -> None:
            for mailbox in unfinished.values():
                run_logged(partial(thread.close, mailbox))

        streams = {request.request_id for request in requests if request.stream}
        try:
            self._call(start)
            yield None  # _run_requests() takes this one
            while unfinished:
                self.engine.owner.check()
                output = arriving.get()
                if isinstance(output, BaseException):
                    raise output
                if output.finished:
                    del unfinished[output.request_id]
                if not (output.request_id in streams and _is_aborted(output)):
                    yield output  # else abort() has returned the rest
        finally:
            if unfinished:  # after an error or Ctrl-C, or the iterator was closed
                thread.post(end)

    def _call(self, command: Callable[[], Result]) -> Result:
        return self._thread.call(command)

    def shutdown(self) -> None:
        """End the workers and free the model. `del llm` and Python's exit do the same.

        If another thread is running a step, that step ends first.
        """
        self._finalizer()

    exit = shutdown
    """nano-vllm's name for it."""


def _is_aborted(output: RequestOutput) -> bool:
    return any(completion.finish_reason == "abort" for completion in output.outputs)


def _with_progress(
    outputs: Iterable[RequestOutput],
    total: int,
    stats: "SchedulerStats",
    before: "SchedulerStats",
    start: float,
) -> Iterator[RequestOutput]:
    """Pass on outputs; show how many there are, and the rates since the last of them.

    With speculation it also shows the mean acceptance length of all outputs so far.

    Args:
        before, start: the counts and time.perf_counter() when the requests were queued.
    """
    from tqdm.auto import tqdm

    drafts = DraftCounts()
    with tqdm(total=total, desc="Generating") as bar:
        for output in outputs:
            drafts += output.metrics.drafts
            seconds = time.perf_counter() - start
            rates = {
                "Prefill": (stats.num_prefill_tokens - before.num_prefill_tokens) / seconds,
                "Decode": (stats.num_decode_tokens - before.num_decode_tokens) / seconds,
            }
            shown = {name: f"{rate:.0f}tok/s" for name, rate in rates.items() if rate}
            if shown and drafts.num_drafts:
                shown["Acceptance length"] = f"{drafts.mean_acceptance_length:.2f}"
            if shown:  # empty if this output is from the same step as the last one
                bar.set_postfix(shown, refresh=False)
                start += seconds
                before = copy.copy(stats)
            bar.update()
            yield output
