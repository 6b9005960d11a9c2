"""The facade: `LLM(model).generate(prompts, sampling_params)`. Everything it does, `LLMEngine`
does step by step.
"""

import time
from collections.abc import (
    Mapping,
    Sequence as Seq,
)
from typing import TYPE_CHECKING, Any

from tqdm.auto import tqdm

from nanovllm.config import Config
from nanovllm.engine.llm_engine import LLMEngine, Prompt
from nanovllm.errors import InvalidRequestError
from nanovllm.outputs import RequestOutput
from nanovllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class LLM:
    """A model, ready to generate.

    Args:
        model: a local checkpoint directory or a Hugging Face hub id.
        options: the fields of `Config`.

    Raises:
        ConfigError: an option is unknown or impossible.
        CheckpointError: the model cannot be found, read or run.
        OutOfMemoryError: the KV pool cannot hold one sequence of max_model_len tokens.
    """

    def __init__(self, model: str, **options: Any) -> None:
        self.engine = LLMEngine(Config(model=model, **options))

    def generate(
        self,
        prompts: Prompt | Seq[Prompt],
        sampling_params: SamplingParams | Seq[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Generate for one prompt or many; outputs come in the order of the prompts.

        Args:
            prompts: a string, a list of token ids, or a list of such.
            sampling_params: for all prompts, or one for each; None is `SamplingParams()`.
            use_tqdm: show progress with tokens per second.

        Raises:
            InvalidRequestError: a prompt or its parameters cannot be served; none has been started.
            EngineDeadError: the engine is down.
        """
        prompts = _as_list(prompts)
        if not isinstance(sampling_params, Seq):
            sampling_params = [sampling_params or SamplingParams()] * len(prompts)
        if len(sampling_params) != len(prompts):
            raise InvalidRequestError(
                f"{len(prompts)} prompts but {len(sampling_params)} sampling_params; "
                "give one for all, or one for each prompt"
            )
        sequences = [
            self._make_sequence(index, prompt, params)
            for index, (prompt, params) in enumerate(zip(prompts, sampling_params, strict=True))
        ]
        outputs: dict[int, RequestOutput | None] = {seq.seq_id: None for seq in sequences}
        try:
            for seq in sequences:
                self.engine.add_sequence(seq)
            with tqdm(total=len(sequences), desc="Generating", disable=not use_tqdm) as bar:
                self._run(outputs, bar)
        finally:
            for request_id, output in outputs.items():
                if output is None:  # an error or Ctrl-C: leave nothing behind
                    self.engine.abort(request_id)
        return [output for output in outputs.values() if output is not None]

    def get_tokenizer(self) -> "PreTrainedTokenizerBase | None":
        """Return the checkpoint's tokenizer (transformers), None if it has none."""
        return self.engine.output_processor.tokenizer

    def shutdown(self) -> None:
        """End the workers and free the model now; `del llm` and leaving Python do the same."""
        self.engine.shutdown()

    def _make_sequence(self, index: int, prompt: Prompt, params: SamplingParams) -> Any:
        try:
            return self.engine.make_sequence(prompt, params)
        except InvalidRequestError as error:
            raise InvalidRequestError(f"prompt {index}: {error}") from None

    def _run(self, outputs: dict[int, RequestOutput | None], bar: "tqdm[Any]") -> None:
        num_left = len(outputs)
        while num_left:
            stats, start = self.engine.stats, time.perf_counter()
            prefill, decode = stats.num_prefill_tokens, stats.num_decode_tokens
            for output in self.engine.step():
                if output.request_id in outputs:
                    outputs[output.request_id] = output
                    num_left -= 1
                    bar.update()
                else:
                    self.engine.put_back([output])
            seconds = time.perf_counter() - start
            rates = {
                "Prefill": (stats.num_prefill_tokens - prefill) / seconds,
                "Decode": (stats.num_decode_tokens - decode) / seconds,
            }
            shown = {name: f"{rate:.0f}tok/s" for name, rate in rates.items() if rate}
            if shown:
                bar.set_postfix(shown, refresh=False)


def _as_list(prompts: Any) -> list[Any]:
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if not isinstance(prompts, Seq):
        raise InvalidRequestError(
            f"prompts must be a string, token ids, or a list of them, got {type(prompts).__name__}"
        )
    if prompts and all(isinstance(item, int) for item in prompts):
        return [prompts]
    return list(prompts)
