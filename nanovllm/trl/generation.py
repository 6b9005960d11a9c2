"""`EngineGeneration`: what TRL's trainers ask of vLLM in their process, asked of nanovllm.

Subclasses TRL's own class, which walks over a model's parameters (PEFT, FSDP, DeepSpeed) and keeps
the parameters of sampling. Knows no loss.
"""

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from trl.generation.vllm_generation import VLLMGeneration, extract_logprobs

from nanovllm.errors import ConfigError, InvalidRequestError
from nanovllm.llm import LLM
from nanovllm.options.sampling_params import SamplingParams
from nanovllm.options.validation import shown

LOGPROBS_MODE = "processed_logprobs"
"""TRL's correction by importance sampling needs the distribution from which tokens were drawn."""


class EngineGeneration(VLLMGeneration):  # type: ignore[misc]
    """Generates with an `LLM` in this process.

    Args:
        engine_options: fields of `Config` that replace those that follow from the arguments.
        arguments: those of TRL's class; mode must be "colocate", tensor_parallel_size 1.

    Raises:
        ConfigError: they are not, or the trainer has several processes.
    """

    def __init__(
        self, *, engine_options: Mapping[str, Any] | None = None, **arguments: Any
    ) -> None:
        mode, size = arguments.get("mode", "colocate"), arguments.get("tensor_parallel_size", 1)
        if mode != "colocate" or size != 1:
            raise ConfigError(
                f"vllm_mode {shown(mode)} with vllm_tensor_parallel_size {shown(size)}: "
                'nanovllm.trl generates in the trainer\'s process; use "colocate" and 1'
            )
        self._engine_options = dict(engine_options or {})
        super().__init__(**arguments)

    def _init_vllm(self) -> None:
        if self.accelerator.num_processes != 1:
            raise ConfigError(
                f"the trainer has {self.accelerator.num_processes} processes, nanovllm.trl takes "
                "one; for more ranks use tensor_parallel_size in engine_options"
            )
        options: dict[str, Any] = {
            "dtype": _dtype(self.model),
            "max_num_seqs": self.max_num_seqs,
            "seed": self.accelerator.process_index,
            "logprobs_mode": LOGPROBS_MODE,
            "device": "cuda" if self.accelerator.device.type == "cuda" else "cpu",
        }
        if self.max_model_length is not None:
            options["max_model_len"] = self.max_model_length
        options |= self._engine_options
        if options["logprobs_mode"] != LOGPROBS_MODE:
            raise ConfigError(f'logprobs_mode must be "{LOGPROBS_MODE}": TRL weighs samples by it')
        self.llm = LLM(self._path(), **{k: v for k, v in options.items() if v is not None})
        if self.enable_sleep_mode:
            self.llm.sleep(level=2)
        self._llm_weights_sleeping = self.enable_sleep_mode

    def _path(self) -> str:
        path = self.model.name_or_path
        if not path:
            raise ConfigError(
                "the model has no name_or_path, from which the engine reads the architecture: load "
                "it with from_pretrained, or save it first"
            )
        return str(Path(path)) if Path(path).exists() else str(path)

    def sync_weights(self) -> None:
        """Give the engine the weights of the model that is trained."""
        if self.enable_sleep_mode:
            self.llm.wake_up(tags=["weights"])
            self._llm_weights_sleeping = False
        with contextlib.closing(self._iter_named_params()) as parameters:
            self.llm.update_weights(parameters)

    def generate(
        self,
        prompts: list[list[int]],
        images: list[Any] | None,
        num_generations: int,
        profiler: Any = None,
    ) -> tuple[list[list[int]], list[list[int]], Any, Any]:
        """Generate one completion for each of `prompts`, as TRL's class does.

        Returns:
            prompt ids, completion ids, and the log-probabilities of the sampled tokens with their
            ids, both [prompts][tokens][1 + logprobs].

        Raises:
            InvalidRequestError: there are images.
        """
        if images is not None and any(image is not None for image in images):
            raise InvalidRequestError("the models here read text only; leave images out")
        if self.enable_sleep_mode:
            if self._llm_weights_sleeping:
                self.sync_weights()
            self.llm.wake_up(tags=["kv_cache"])
        params = SamplingParams(**self._sampling())
        asked = [{"prompt_token_ids": ids} for ids in prompts]
        with profiler or contextlib.nullcontext():
            outputs = self.llm.generate(asked, params, use_tqdm=False)
        prompt_ids = [output.prompt_token_ids for output in outputs]
        completion_ids = [each.token_ids for output in outputs for each in output.outputs]
        logprobs, token_ids = extract_logprobs(outputs)
        if self.enable_sleep_mode:
            self.llm.sleep(level=2)
            self._llm_weights_sleeping = True
        return prompt_ids, completion_ids, logprobs, token_ids

    def _sampling(self) -> dict[str, Any]:
        options = {
            "n": 1,
            "repetition_penalty": self.repetition_penalty,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "min_p": 0.0 if self.min_p is None else self.min_p,
            "max_tokens": self.max_completion_length,
            "logprobs": self.logprobs,
            **self.generation_kwargs,
        }
        if self.structured_outputs_regex is not None:
            options["structured_outputs"] = {"regex": self.structured_outputs_regex}
        return options


def _dtype(model: torch.nn.Module) -> str:
    """Return the dtype of the model's weights: 16 bits for a mix with float32."""
    found = {parameter.dtype for parameter in model.parameters()}
    halves = {torch.bfloat16: "bfloat16", torch.float16: "float16"}
    return next((name for dtype, name in halves.items() if dtype in found), "float32")
