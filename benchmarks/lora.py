"""The cost of adapters: a batch of requests over several adapters and none, against the base model.

Rounds are interleaved: base, adapters, base, ... It prints the median of the rounds' ratios of
output tokens a second, and takes two minutes on two cores. The weights are random, in a shape from
`benchmarks.shapes`; each adapter changes all linears of the layers.
"""

import argparse
import json
import math
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.shapes import CONFIGS, SMALL
from nanovllm import LLM, LoRARequest, SamplingParams
from nanovllm.features.lora.targets import adapter_linears
from nanovllm.models.registry import read_config


def write_adapters(path: Path, config: dict[str, Any], count: int, rank: int) -> list[LoRARequest]:
    """Write `count` random adapters of all linears in bfloat16, and return them."""
    linears = {part.name: part.shape for part in adapter_linears(read_config(config)).values()}
    requests = []
    for number in range(count):
        directory = path / f"adapter{number}"
        directory.mkdir()
        fields = {"peft_type": "LORA", "r": rank, "lora_alpha": rank}
        fields["target_modules"] = "all-linear"
        (directory / "adapter_config.json").write_text(json.dumps(fields))
        tensors = {}
        for module, (outputs, inputs) in linears.items():
            key = f"base_model.model.{module}"
            a = torch.randn(rank, inputs) / math.sqrt(inputs)
            tensors[f"{key}.lora_A.weight"] = a.bfloat16()
            tensors[f"{key}.lora_B.weight"] = (0.05 * torch.randn(outputs, rank)).bfloat16()
        save_file(tensors, directory / "adapter_model.safetensors")
        requests.append(LoRARequest(directory.name, number + 1, str(directory)))
    return requests


def tokens_per_second(
    llm: LLM, prompts: list[list[int]], requests: list[LoRARequest | None], num_tokens: int
) -> float:
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    start = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False, lora_request=requests)
    seconds = time.perf_counter() - start
    assert all(output.outputs[0].finish_reason == "length" for output in outputs)
    return len(prompts) * num_tokens / seconds


def main() -> None:
    """Run the rounds and print each one's rates, and the ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=CONFIGS, default=SMALL)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--adapters", type=int, default=8)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=48, help="output tokens of a request")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quantization", choices=["int8", "w8a8", "int4"])
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path, config = Path(folder), CONFIGS[args.shape]
        (path / "config.json").write_text(json.dumps(config))
        adapters = write_adapters(path, config, args.adapters, args.rank)
        options: dict[str, Any] = {
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            "enable_prefix_caching": False,
            "max_model_len": args.prompt_tokens + args.tokens + 1,
            "max_num_seqs": args.requests,
            "quantization": args.quantization,
        }
        base = LLM(folder, **options)
        adapted = LLM(
            folder,
            **options,
            enable_lora=True,
            max_loras=args.adapters,
            max_lora_rank=args.rank,
        )
        prompts = [
            [(i * 37 + j) % 1000 for j in range(args.prompt_tokens)] for i in range(args.requests)
        ]
        choices = [None, *adapters]
        requests = [choices[i % len(choices)] for i in range(args.requests)]
        nobody: list[LoRARequest | None] = [None] * args.requests
        tokens_per_second(base, prompts, nobody, 2)
        tokens_per_second(adapted, prompts, requests, 2)  # loads the adapters
        mixed, idle = [], []
        for _ in range(args.rounds):
            rate = tokens_per_second(base, prompts, nobody, args.tokens)
            mixed.append(tokens_per_second(adapted, prompts, requests, args.tokens) / rate)
            idle.append(tokens_per_second(adapted, prompts, nobody, args.tokens) / rate)
            print(f"base {rate:.1f} tokens/s; adapters {mixed[-1]:.3f} of it; none {idle[-1]:.3f}")
    print(f"median: adapters {statistics.median(mixed):.3f}, none {statistics.median(idle):.3f}")


if __name__ == "__main__":
    main()
