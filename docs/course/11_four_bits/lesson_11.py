"""Lesson 11: weights in 4 bits, with a scale for each 32 of them."""

from pathlib import Path

import torch
from safetensors.torch import load_file

from nanovllm import LLM, SamplingParams, demo_model
from nanovllm.features.quantization.integer import IntTensor, quantize

GROUP = 32
NAME = "model.layers.0.mlp.down_proj.weight"


def load_weight() -> torch.Tensor:
    """Return a matrix of the shipped model, [128, 384] in bfloat16."""
    [file] = Path(demo_model.MODEL).glob("*.safetensors")
    weights: dict[str, torch.Tensor] = load_file(file)
    return weights[NAME]


def restore(rounded: IntTensor) -> torch.Tensor:
    """Return the weights that the integers stand for: each times its group's scale."""
    scales = rounded.scales.float().repeat_interleave(GROUP, dim=1)
    return rounded.values.float() * scales


def num_bytes(rounded: IntTensor) -> int:
    """Return the bytes that the weight takes: half a byte for each integer, and the scales."""
    return rounded.values.numel() // 2 + rounded.scales.nbytes


def answer(quantization: str | None) -> str:
    """Return what the model says with its weights rounded."""
    llm = LLM(demo_model.MODEL, device="cpu", max_model_len=128, quantization=quantization)
    params = SamplingParams(temperature=0, max_tokens=24)
    return llm.generate("A KV cache is", params, use_tqdm=False)[0].text


def main() -> None:
    weight = load_weight()
    rounded = quantize(weight, bits=4, group_size=GROUP)
    restored = restore(rounded)
    print("weights: ", *(f"{value:7.3f}" for value in weight[0, :8].tolist()))
    print("scale:   ", f"{rounded.scales[0, 0].item():7.4f}, for these and 24 more")
    print("integers:", *(f"{value:7}" for value in rounded.values[0, :8].tolist()))
    print("restored:", *(f"{value:7.3f}" for value in restored[0, :8].tolist()))

    difference = (restored - weight.float()).abs()
    half_steps = difference / rounded.scales.float().repeat_interleave(GROUP, dim=1)
    clipped = (half_steps > 0.51).float().mean().item()
    print(f"off by more than half a scale: {clipped:.1%} of the weights")
    print(f"bytes: {weight.nbytes} -> {num_bytes(rounded)}")

    for quantization in (None, "int8", "int4"):
        print(f"{quantization}: {answer(quantization)!r}")


if __name__ == "__main__":
    main()
