"""TRL's asynchronous GRPO against a server of nanovllm, on a CPU.

`python examples/async_grpo_trl.py` starts `nanovllm serve --dev-mode` with the shipped model,
trains it on a made-up task, for which the reward of an answer is its share of the letter e, and
shows the mean reward of each step. With --lora the server gets adapters in place of all weights.
Needs `pip install trl requests aiohttp peft`.
"""

import argparse
import contextlib
import itertools
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AttentionInterface, AutoTokenizer
from trl.chat_template_utils import qwen3_template
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer, async_rollout_worker
from trl.experimental.async_grpo.packing import TREE_ATTENTION
from weight_sender import WeightSender

from nanovllm import demo_model


def share_of_e(completions: list[Any], **_: Any) -> list[float]:
    """Return the reward of each conversation, from 0 to 1."""
    texts = [messages[-1]["content"] or "" for messages in completions]
    return [text.count("e") / max(1, len(text)) for text in texts]


def attention_on_cpu(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: None,
    *,
    tree_kv_index: torch.Tensor,
    tree_cu_seqlens_q: torch.Tensor,
    tree_cu_seqlens_k: torch.Tensor,
    scaling: float | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Do what TRL's attention does by a CUDA kernel: each segment attends to its path."""
    starts, path_starts = tree_cu_seqlens_q.tolist(), tree_cu_seqlens_k.tolist()
    parts = []
    for index, (start, end) in enumerate(itertools.pairwise(starts)):
        path = tree_kv_index[path_starts[index] : path_starts[index + 1]]
        length = end - start
        mask = torch.ones(length, len(path), dtype=torch.bool).tril(len(path) - length)
        parts.append(
            torch.nn.functional.scaled_dot_product_attention(
                query[:, :, start:end],
                key[:, :, path],
                value[:, :, path],
                attn_mask=mask,
                scale=scaling,
                enable_gqa=True,
            )
        )
    return torch.cat(parts, 2).transpose(1, 2), None


@contextlib.contextmanager
def served(model: str, *options: str) -> Iterator[str]:
    """Run a server that takes weights; yield its URL."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "nanovllm", "serve", model, "--dev-mode", f"--port={port}"]
    server = subprocess.Popen([*command, "--max-model-len=256", "--log-level=warning", *options])
    url = f"http://127.0.0.1:{port}"
    try:
        while server.poll() is None:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health"):
                break
            time.sleep(0.2)
        yield url
    finally:
        server.terminate()
        server.wait()


def make_trainer(
    url: str, steps: int, directory: str, peft_config: LoraConfig | None = None
) -> AsyncGRPOTrainer:
    """Return a trainer of the shipped model in float32.

    Args:
        url: of the server.
        directory: for what the trainer writes.
        peft_config: trains an adapter; None trains all weights.
    """
    args = AsyncGRPOConfig(
        directory,
        max_steps=steps,
        per_device_train_batch_size=16,
        num_generations=8,
        max_completion_length=16,
        max_staleness=1,
        learning_rate=1e-3 if peft_config is None else 1e-2,
        temperature=1.5,
        vllm_server_base_url=url,
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        seed=1,
        disable_tqdm=True,
        report_to=[],
        save_strategy="no",
    )
    tokenizer = AutoTokenizer.from_pretrained(demo_model.MODEL)
    tokenizer.response_template = qwen3_template  # the same marks around an answer
    # One question at a temperature at which the sure little model explores: rewards of several
    # questions differ by more than they rise.
    prompt = [{"role": "user", "content": "What is a token?"}]
    with (  # TRL wants a name of a GPU, and to find vLLM installed, of which it calls nothing
        mock.patch("torch.cuda.get_device_name", return_value="CPU"),
        mock.patch.object(async_rollout_worker, "is_vllm_available", return_value=True),
    ):
        trainer = AsyncGRPOTrainer(
            demo_model.MODEL,
            share_of_e,
            args,
            train_dataset=Dataset.from_dict({"prompt": [prompt] * 256}),
            processing_class=tokenizer,
            peft_config=peft_config,
            weight_transfer=WeightSender(url) if peft_config is None else None,
        )
    AttentionInterface.register(TREE_ATTENTION, attention_on_cpu)
    return trainer


def train(steps: int, *, lora: bool = False) -> list[float]:
    """Return the mean reward of each step."""
    with tempfile.TemporaryDirectory() as directory:
        options = ["--dtype=float32"]
        if lora:
            options += ["--enable-lora", "--max-lora-rank=8", "--max-loras=4"]
            options.append(f"--lora-directory={directory}")
        with served(demo_model.MODEL, *options) as url:
            adapter = LoraConfig(r=8, target_modules="all-linear") if lora else None
            trainer = make_trainer(url, steps, directory, adapter)
            trainer.train()
    return [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--lora", action="store_true")
    args = parser.parse_args()
    for step, reward in enumerate(train(args.steps, lora=args.lora), 1):
        print(f"step {step}: reward {reward:.3f}")
