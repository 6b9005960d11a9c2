"""TRL's GRPOTrainer on a CPU, generating with nanovllm in its process: `python -m benchmarks.grpo`.

Trains the shipped model on a made-up task: the reward of an answer is its share of the letter e.
Shows the mean reward of each step.
"""

import argparse
import tempfile
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig

from nanovllm import demo_model
from nanovllm.trl import GRPOTrainer

_QUESTIONS = ["What is a token?", "What is KV cache?", "Explain batching.", "What is a GPU?"]


def share_of_e(completions: list[str], **_: Any) -> list[float]:
    """Return the reward of each completion, from 0 to 1."""
    return [text.count("e") / max(1, len(text)) for text in completions]


def make_trainer(steps: int, directory: str, **engine_options: Any) -> GRPOTrainer:
    """Return a trainer of the shipped model in float32, on one thread's worth of work.

    Args:
        directory: for what the trainer writes.
        engine_options: fields of `Config`.
    """
    args = GRPOConfig(
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
    model = AutoModelForCausalLM.from_pretrained(demo_model.MODEL, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(demo_model.MODEL)
    prompts = Dataset.from_dict({"prompt": _QUESTIONS * 64})
    return GRPOTrainer(
        model,
        share_of_e,
        args,
        train_dataset=prompts,
        processing_class=tokenizer,
        engine_options=engine_options,
    )


def main() -> None:
    """Train, and show the rewards."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    with tempfile.TemporaryDirectory() as directory:
        trainer = make_trainer(parser.parse_args().steps, directory)
        trainer.train()
    for entry in trainer.state.log_history:
        if "reward" in entry:
            print(f"step {entry['step']}: reward {entry['reward']:.3f}")


if __name__ == "__main__":
    main()
