"""GRPO with TRL, whose completions nanovllm generates in the trainer's process, on a CPU.

`python examples/grpo_trl.py` trains the shipped model on a made-up task, for which the reward of an
answer is its share of the letter e, and shows the mean reward of each step. Needs
`pip install trl`. `GRPOTrainer` and `EngineGeneration` work with other models and rewards: copy
them.
"""

import contextlib
import copy
import tempfile
from typing import Any

import torch
import trl
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl.generation.vllm_generation import VLLMGeneration, extract_logprobs

from nanovllm import LLM, SamplingParams, StructuredOutputsParams, demo_model


class EngineGeneration(VLLMGeneration):  # type: ignore[misc]
    """What TRL's trainers ask of vLLM in their process, asked of an `LLM`.

    TRL's own class walks over the parameters (PEFT, FSDP, DeepSpeed) and keeps those of sampling.

    Args:
        engine_options: fields of `Config` that replace those that follow from the arguments.
        arguments: those of TRL's class.

    Raises:
        ValueError: the trainer has several processes, or it asks for a server.
    """

    def __init__(self, *, engine_options: dict[str, Any] | None = None, **arguments: Any) -> None:
        if arguments.get("mode") != "colocate" or arguments.get("tensor_parallel_size") != 1:
            raise ValueError('this engine is in the trainer\'s process: use "colocate" and 1 rank')
        self._engine_options = engine_options or {}
        super().__init__(**arguments)

    def _init_vllm(self) -> None:
        if self.accelerator.num_processes != 1:
            raise ValueError("the trainer must have one process")
        dtypes = {parameter.dtype for parameter in self.model.parameters()}
        options = {
            "device": self.accelerator.device.type,
            "dtype": "bfloat16" if torch.bfloat16 in dtypes else "float32",
            "max_num_seqs": self.max_num_seqs,
            "max_model_len": self.max_model_length,
            "logprobs_mode": "processed_logprobs",  # TRL weighs samples by what was drawn from
            **self._engine_options,
        }
        self.llm = LLM(self.model.name_or_path, **options)
        self._llm_weights_sleeping = self.enable_sleep_mode
        if self.enable_sleep_mode:
            self.llm.sleep(level=2)

    def sync_weights(self) -> None:
        """Give the engine the weights of the model that is trained."""
        if self.enable_sleep_mode:
            self.llm.wake_up(tags=["weights"])
            self._llm_weights_sleeping = False
        with contextlib.closing(self._iter_named_params()) as parameters:
            self.llm.update_weights(parameters)

    def generate(
        self, prompts: list[list[int]], images: Any, num_generations: int, profiler: Any = None
    ) -> tuple[list[list[int]], list[list[int]], Any, Any]:
        """Generate one completion for each of `prompts`, as TRL's class does.

        Returns:
            prompt ids, completion ids, and the log-probabilities of the sampled tokens with their
            ids, both [prompts][tokens][1 + logprobs].

        Raises:
            ValueError: there are images.
        """
        if images is not None and any(image is not None for image in images):
            raise ValueError("the models here read text only")
        regex = self.structured_outputs_regex
        if self.enable_sleep_mode:
            if self._llm_weights_sleeping:
                self.sync_weights()
            self.llm.wake_up(tags=["kv_cache"])
        params = SamplingParams(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p or 0.0,
            repetition_penalty=self.repetition_penalty,
            max_tokens=self.max_completion_length,
            logprobs=self.logprobs,
            structured_outputs=None if regex is None else StructuredOutputsParams(regex=regex),
            **self.generation_kwargs,
        )
        with profiler or contextlib.nullcontext():
            outputs = self.llm.generate(prompts, params, use_tqdm=False)
        completion_ids = [output.token_ids for output in outputs]
        logprobs, token_ids = extract_logprobs(outputs)
        if self.enable_sleep_mode:
            self.llm.sleep(level=2)
            self._llm_weights_sleeping = True
        return [output.prompt_token_ids for output in outputs], completion_ids, logprobs, token_ids


class GRPOTrainer(trl.GRPOTrainer):  # type: ignore[misc]
    """`trl.GRPOTrainer` with `use_vllm`, where vLLM is nanovllm.

    The options of GRPOConfig that begin with `vllm_` mean the same.

    Args:
        engine_options: fields of `Config`, such as quantization, for the engine.
    """

    def __init__(
        self,
        model: Any,
        reward_funcs: Any,
        args: trl.GRPOConfig,
        *,
        engine_options: dict[str, Any] | None = None,
        **named: Any,
    ) -> None:
        args = copy.copy(args)
        args.use_vllm = False  # TRL would import vLLM for it
        super().__init__(model, reward_funcs, args, **named)
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


def share_of_e(completions: list[str], **_: Any) -> list[float]:
    """Return the reward of each completion, from 0 to 1."""
    return [text.count("e") / max(1, len(text)) for text in completions]


def make_trainer(steps: int, directory: str, **engine_options: Any) -> GRPOTrainer:
    """Return a trainer of the shipped model in float32.

    Args:
        directory: for what the trainer writes.
        engine_options: fields of `Config`.
    """
    args = trl.GRPOConfig(
        directory,
        max_steps=steps,
        per_device_train_batch_size=16,
        num_generations=8,
        max_completion_length=16,
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        temperature=1.0,
        vllm_max_model_length=128,
        vllm_enable_sleep_mode=True,
        bf16=False,
        use_cpu=True,
        seed=1,
        logging_steps=1,
        disable_tqdm=True,
        report_to=[],
        save_strategy="no",
    )
    questions = ["What is a token?", "What is KV cache?", "Explain batching.", "What is a GPU?"]
    return GRPOTrainer(
        AutoModelForCausalLM.from_pretrained(demo_model.MODEL, dtype=torch.float32),
        share_of_e,
        args,
        train_dataset=Dataset.from_dict({"prompt": questions * 64}),
        processing_class=AutoTokenizer.from_pretrained(demo_model.MODEL),
        engine_options=engine_options,
    )


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        trainer = make_trainer(20, directory)
        trainer.train()
    for entry in trainer.state.log_history:
        if "reward" in entry:
            print(f"step {entry['step']}: reward {entry['reward']:.3f}")
