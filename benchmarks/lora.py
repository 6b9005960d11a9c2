"""The cost of adapters: a batch of requests over several adapters and none, against the base model.

Prints the median rates of rounds in turns, and the medians of the rounds' ratios. The weights are
random; each adapter changes all linears of the layers.
"""

import json
import math
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from safetensors.torch import save_file

from bench import workload
from benchmarks.harness import Table, in_turns, loadable, make_parser, ratio
from benchmarks.shapes import CONFIGS, SMALL
from nanovllm import LLM, LoRARequest, SamplingParams
from nanovllm.features.lora.adapter_registry import adapter_linears
from nanovllm.models.registry import read_config

PROMPT_TOKENS, TOKENS = 32, 48
"""Of a request: its prompt's tokens, and its output's."""


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
    llm: LLM, prompts: list[list[int]], requests: list[LoRARequest | None]
) -> float:
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    start = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False, lora_request=requests)
    seconds = time.perf_counter() - start
    assert all(output.outputs[0].finish_reason == "length" for output in outputs)
    return len(prompts) * TOKENS / seconds


def main() -> None:
    """Run the rounds and print each kind's rate, and its ratio to the base model's."""
    parser = make_parser("lora", __doc__, model=False)
    parser.add_argument("--shape", choices=CONFIGS, default=SMALL)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--adapters", type=int, default=8)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--quantization", choices=["int8", "w8a8", "int4"])
    args = parser.parse_args()
    with loadable(args.shape) as (folder, load_format):
        adapters = write_adapters(Path(folder), CONFIGS[args.shape], args.adapters, args.rank)
        options: dict[str, Any] = {
            "load_format": load_format,
            "enable_prefix_caching": False,
            "max_model_len": PROMPT_TOKENS + TOKENS + 1,
            "max_num_seqs": args.requests,
            "quantization": args.quantization,
        }
        base = LLM(folder, **options)
        options |= {"max_loras": args.adapters, "max_lora_rank": args.rank}
        adapted = LLM(folder, enable_lora=True, **options)
        prompts, _ = workload(args.requests, (PROMPT_TOKENS,) * 2, (1, 1), 0)
        choices = [None, *adapters]
        mixed = [choices[i % len(choices)] for i in range(args.requests)]
        nobody: list[LoRARequest | None] = [None] * args.requests
        runs = {
            "the base model": lambda _: tokens_per_second(base, prompts, nobody),
            "adapters and none": lambda _: tokens_per_second(adapted, prompts, mixed),
            "none, adapters loaded": lambda _: tokens_per_second(adapted, prompts, nobody),
        }
        found = in_turns(runs, args.rounds)
    table = Table("requests of", "tokens a second", "of the base model's")
    for name, rates in found.items():
        table.row(name, median(rates), f"{ratio(rates, found['the base model']):.3f}")


if __name__ == "__main__":
    main()
