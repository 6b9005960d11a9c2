"""`LLM`: the methods `generate`, `chat` and `stream` for one caller at a time.

Knows no scheduling and no text: it runs the steps of `LLMEngine` until its requests are finished.
"""

import time
from collections.abc import Iterator, Mapping, Sequence as Seq
from typing import TYPE_CHECKING, Any

from tqdm.auto import tqdm

from nanovllm.config import Config
from nanovllm.engine.chat import Message, is_message, template_options
from nanovllm.engine.input_processor import Prompt, array_to_list
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.errors import CheckpointError, InvalidRequestError
from nanovllm.outputs import RequestOutput
from nanovllm.sampling_params import SamplingParams
from nanovllm.validation import check_bool, shown

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class LLM:
    """A model that is loaded and ready to generate.

    Args:
        model: a local checkpoint directory or a Hugging Face hub id.
        options: the fields of `Config`.

    Raises:
        ConfigError: an option is unknown or invalid.
        CheckpointError: the model cannot be found, read or run.
        OutOfMemoryError: the KV pool cannot hold one sequence of max_model_len tokens.
    """

    def __init__(self, model: str, **options: Any) -> None:
        self.engine = LLMEngine(Config(model=model, **options))

    def generate(
        self,
        prompts: Prompt | Seq[Prompt] | None = None,
        sampling_params: SamplingParams | Seq[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        prompt_token_ids: Seq[int] | Seq[Seq[int]] | None = None,
        priority: int | Seq[int] = 0,
    ) -> list[RequestOutput]:
        """Generate for one prompt or many; return the outputs in the order of the prompts.

        Args:
            prompts: a string, token ids, a dictionary, or a list of these. Token ids are a list, a
                numpy array or a torch tensor; two dimensions are a list of prompts.
            prompt_token_ids: token ids to use instead of `prompts`.
            sampling_params: one for all prompts, or a list with one for each prompt; None is
                `SamplingParams()`.
            use_tqdm: show a progress bar with tokens per second.
            priority: one for all prompts, or a list with one for each; lower values go first.

        Raises:
            InvalidRequestError: a prompt or a parameter is invalid or unsupported; no request was
                queued.
            EngineDeadError: the engine is down.
        """
        prompts = _as_prompts(prompts, prompt_token_ids)
        if sampling_params is None:
            sampling_params = SamplingParams()
        all_params: Any = sampling_params
        if not isinstance(sampling_params, list | tuple):
            all_params = [sampling_params] * len(prompts)
        priorities = priority if isinstance(priority, Seq) else [priority] * len(prompts)
        for name, given in (("sampling_params", all_params), ("priority", priorities)):
            if len(given) != len(prompts):
                raise InvalidRequestError(
                    f"{len(prompts)} prompts but {len(given)} {name}; "
                    "give one for all, or one for each prompt"
                )
        requests = []
        for index, request in enumerate(zip(prompts, all_params, priorities, strict=True)):
            prompt, params, order = request
            try:
                requests.append(
                    self.engine.input_processor.make_request(prompt, params, priority=order)
                )
            except InvalidRequestError as error:
                raise InvalidRequestError(f"prompt {index}: {error}") from None
        outputs: dict[int, RequestOutput | None] = {r.request_id: None for r in requests}
        try:
            for made in requests:
                self.engine.queue(made)
            with tqdm(total=len(requests), desc="Generating", disable=not use_tqdm) as bar:
                self._run_until_finished(outputs, bar)
        finally:
            for request_id, output in outputs.items():
                if output is None:  # after an error or Ctrl-C
                    self.engine.discard(request_id)
        return [output for output in outputs.values() if output is not None]

    def chat(
        self,
        messages: Seq[Message] | Seq[Seq[Message]],
        sampling_params: SamplingParams | Seq[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        priority: int | Seq[int] = 0,
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
            sampling_params, use_tqdm, priority: as for `generate`.
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
        conversations: Any = messages
        if not isinstance(messages, list | tuple):
            raise InvalidRequestError(
                f"messages must be a conversation or a list of them, got {shown(messages)}"
            )
        if messages and is_message(messages[0]):
            conversations = [messages]
        options = template_options(
            add_generation_prompt,
            continue_final_message,
            tools,
            chat_template,
            chat_template_kwargs,
        )
        render = self.engine.input_processor.render
        prompts = [render(conversation, options) for conversation in conversations]
        return self.generate(prompts, sampling_params, use_tqdm, priority=priority)

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        priority: int = 0,
    ) -> Iterator[RequestOutput]:
        """Generate for one prompt and yield the delta of each step.

        Joined, the texts, token ids and logprobs of the deltas are those that `generate` returns.
        Closing the iterator aborts the request.

        Raises:
            InvalidRequestError: the prompt or a parameter is invalid or unsupported. This call
                raises it, not the iterator.
            EngineDeadError: the engine is down.
        """
        request_id = self.engine.add_request(
            prompt, sampling_params, priority=priority, stream=True
        )
        outputs = self._stream(request_id)
        next(outputs)  # enter its try block, so that closing the iterator aborts the request
        return outputs

    def abort(self, request_id: int) -> RequestOutput | None:
        """End a request and return its output that was not sent yet; None if it is not running."""
        return self.engine.abort(request_id)

    def render(self, messages: Seq[Message], **options: Any) -> list[int]:
        """Return the token ids of a conversation, rendered by the checkpoint's chat template.

        Args:
            options: add_generation_prompt, continue_final_message, tools, chat_template, and
                further variables of the template.

        Raises:
            InvalidRequestError: there is no chat template, or it cannot render the messages.
        """
        processor = self.engine.input_processor
        return processor.encode(processor.render(messages, options))

    def get_tokenizer(self) -> "PreTrainedTokenizerBase | None":
        """Return the checkpoint's transformers tokenizer, None if it has none."""
        return self.engine.input_processor.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the sampling parameters recommended in the checkpoint's generation_config.json."""
        return default_sampling_params(self.engine.generation_config)

    def shutdown(self) -> None:
        """End the workers and free the model. `del llm` and the exit of Python do the same."""
        self.engine.shutdown()

    def _stream(self, request_id: int) -> Iterator[Any]:
        """Yield None once, then the outputs of a request; abort it when closed before its end."""
        finished = False
        try:
            yield None  # stream() takes this one
            while not finished:
                outputs = self.engine.step()
                self.engine.defer_outputs([o for o in outputs if o.request_id != request_id])
                ours = [o for o in outputs if o.request_id == request_id]
                finished = any(o.finished for o in ours) or not (
                    ours or self.engine.is_running(request_id)  # neither: it was aborted
                )
                yield from ours
        finally:
            if not finished:
                self.engine.discard(request_id)

    def _run_until_finished(
        self, outputs: dict[int, RequestOutput | None], bar: "tqdm[Any]"
    ) -> None:
        """Step until every request of `outputs` has its output in it, and show rates in `bar`."""
        num_left = len(outputs)
        while num_left:
            stats, start = self.engine.stats, time.perf_counter()
            prefill, decode = stats.num_prefill_tokens, stats.num_decode_tokens
            others = []
            for output in self.engine.step():
                if output.request_id in outputs:
                    outputs[output.request_id] = output
                    num_left -= 1
                    bar.update()
                else:
                    others.append(output)
            self.engine.defer_outputs(others)
            seconds = time.perf_counter() - start
            rates = {
                "Prefill": (stats.num_prefill_tokens - prefill) / seconds,
                "Decode": (stats.num_decode_tokens - decode) / seconds,
            }
            shown = {name: f"{rate:.0f}tok/s" for name, rate in rates.items() if rate}
            if shown:
                bar.set_postfix(shown, refresh=False)


def default_sampling_params(generation_config: Mapping[str, Any]) -> SamplingParams:
    """Return the sampling parameters recommended in a generation_config.json.

    Raises:
        CheckpointError: it recommends an invalid value.
    """
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    given = {
        name: generation_config[name] for name in names if generation_config.get(name) is not None
    }
    do_sample = generation_config.get("do_sample")
    if do_sample is not None and not check_bool(
        CheckpointError, "generation_config.json: do_sample", do_sample
    ):
        given["temperature"] = 0.0
    if generation_config.get("max_new_tokens") is not None:
        given["max_tokens"] = generation_config["max_new_tokens"]
    try:
        return SamplingParams(**given)
    except InvalidRequestError as error:
        raise CheckpointError(f"generation_config.json: {error}") from error


def _as_prompts(prompts: Any, prompt_token_ids: Any) -> list[Any]:
    """Return the list of prompts that `generate` was given, a list of one for a single prompt."""
    if prompt_token_ids is not None:
        if prompts is not None:
            raise InvalidRequestError("give prompts or prompt_token_ids, not both")
        return [{"prompt_token_ids": ids} for ids in _as_prompts(prompt_token_ids, None)]
    prompts = array_to_list(prompts)
    if isinstance(prompts, str | bytes | Mapping):
        return [prompts]
    if not isinstance(prompts, Seq):
        raise InvalidRequestError(
            f"prompts must be a string, token ids, or a list of them, got {type(prompts).__name__}"
        )
    is_token = prompts and hasattr(prompts[0], "__index__") and not getattr(prompts[0], "ndim", 0)
    return [prompts] if is_token else list(prompts)
