"""Adapters for single requests of a batch: `python examples/lora.py [MODEL ADAPTER]`.

ADAPTER is a directory that PEFT saved. Without one, an adapter of random numbers for the shipped
model shows the form: its text makes no sense, and the text without it is as before.
"""

import json
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file

from nanovllm import LLM, LoRARequest, SamplingParams, demo_model

HIDDEN_SIZE, QUERY_SIZE, NUM_LAYERS, RANK = 128, 128, 4, 4  # of the shipped model


def write_random_adapter(directory: str) -> None:
    """Write what PEFT's save_pretrained writes, for the query projections."""
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": 32, "target_modules": ["q_proj"]}
    Path(directory, "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for layer in range(NUM_LAYERS):
        name = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        tensors[f"{name}.lora_A.weight"] = torch.randn(RANK, HIDDEN_SIZE, generator=generator)
        tensors[f"{name}.lora_B.weight"] = torch.randn(QUERY_SIZE, RANK, generator=generator)
    save_file(tensors, Path(directory, "adapter_model.safetensors"))


def main() -> None:
    with tempfile.TemporaryDirectory() as made:
        model, path = sys.argv[1:3] if len(sys.argv) > 2 else (demo_model.MODEL, made)
        if path == made:
            write_random_adapter(made)
        llm = LLM(model, enable_lora=True, max_loras=2, max_lora_rank=16)
        adapter = LoRARequest("mine", 1, path)
        params = SamplingParams(temperature=0, max_tokens=30)
        prompts = ["A KV cache is"] * 2
        without, adapted = llm.generate(
            prompts, params, lora_request=[None, adapter], use_tqdm=False
        )
        print(f"without: {without.text}")
        print(f"with {adapted.lora_request.lora_name}: {adapted.text}")
        llm.shutdown()


if __name__ == "__main__":
    main()
