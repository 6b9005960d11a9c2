"""`GRPOTrainer`: TRL's, whose completions an engine in this process generates.

Subclasses it, and puts `EngineGeneration` where TRL puts its own class for vLLM.
"""

import copy
from collections.abc import Mapping
from typing import Any

import trl

from nanovllm.trl.generation import EngineGeneration


class GRPOTrainer(trl.GRPOTrainer):  # type: ignore[misc]
    """`trl.GRPOTrainer` with `use_vllm`, where vLLM is nanovllm.

    The options of GRPOConfig that begin with `vllm_` mean the same: the correction by importance
    sampling, vllm_enable_sleep_mode, vllm_max_model_length. Those of a server are refused.

    Args:
        engine_options: fields of `Config`, such as quantization, for the engine.
        arguments: those of `trl.GRPOTrainer`.
    """

    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: Any = None,
        *arguments: Any,
        engine_options: Mapping[str, Any] | None = None,
        **named: Any,
    ) -> None:
        args = trl.GRPOConfig("grpo") if args is None else copy.copy(args)
        args.use_vllm = False  # TRL would import vLLM for it
        super().__init__(model, reward_funcs, args, *arguments, **named)
        self.use_vllm = True
        self.vllm_generation = EngineGeneration(
            model=self.model,
            accelerator=self.accelerator,
            processing_class=self.processing_class,
            mode=args.vllm_mode,
            structured_outputs_regex=args.vllm_structured_outputs_regex,
            tensor_parallel_size=args.vllm_tensor_parallel_size,
            max_model_length=args.vllm_max_model_length,
            max_num_seqs=args.per_device_train_batch_size * args.steps_per_generation,
            enable_sleep_mode=args.vllm_enable_sleep_mode,
            repetition_penalty=self.repetition_penalty,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            max_completion_length=self.max_completion_length,
            logprobs=0,
            generation_kwargs=args.generation_kwargs,
            engine_options=engine_options,
        )
        self._last_loaded_step = -1
