"""Measure offline throughput on nano-vllm's workload: 256 requests, 100 to 1024 tokens in and out.

Every engine gets the same prompts and output lengths. Without --model, the model has random weights
in the shape of Qwen3-0.6B. The flags scale the workload down for a machine without a GPU.
"""

import argparse
import json
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

QWEN3_06B = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "attention_bias": False,
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
    "bos_token_id": 151643,
    "eos_token_id": 151645,
}

Prompts = list[list[int]]
Run = Callable[[Prompts, list[int], dict[str, Any]], None]
"""Called with prompts, output lengths and sampling parameters (temperature, top_k, top_p)."""


def nanovllm(model: str, args: argparse.Namespace) -> Run:
    from nanovllm import LLM, SamplingParams

    llm = LLM(model, load_format=args.load_format, max_model_len=args.max_model_len, **args.option)

    def run(prompts: Prompts, output_lens: list[int], sampling: dict[str, Any]) -> None:
        params = [
            SamplingParams(ignore_eos=True, max_tokens=length, **sampling) for length in output_lens
        ]
        llm.generate(prompts, params, use_tqdm=not args.json)

    return run


def vllm(model: str, args: argparse.Namespace) -> Run:
    from vllm import LLM, SamplingParams

    llm = LLM(
        model,
        load_format=args.load_format,
        max_model_len=args.max_model_len,
        skip_tokenizer_init=True,
        **args.option,
    )

    def run(prompts: Prompts, output_lens: list[int], sampling: dict[str, Any]) -> None:
        params = [
            SamplingParams(ignore_eos=True, max_tokens=length, detokenize=False, **sampling)
            for length in output_lens
        ]
        llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=not args.json)

    return run


def transformers(model: str, args: argparse.Namespace) -> Run:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    device = "cuda" if torch.cuda.is_available() else "cpu"
    if args.load_format == "dummy":
        config = AutoConfig.from_pretrained(model)
        with torch.device(device):
            hf = AutoModelForCausalLM.from_config(config, dtype=config.dtype, **args.option)
    else:
        hf = AutoModelForCausalLM.from_pretrained(model, dtype="auto", **args.option).to(device)
    hf.eval()

    def run(prompts: Prompts, output_lens: list[int], sampling: dict[str, Any]) -> None:
        how: dict[str, Any] = {"do_sample": sampling["temperature"] > 0}
        if how["do_sample"]:
            how |= {"top_k": 0, "top_p": 1.0, **sampling}
        for start in range(0, len(prompts), args.hf_batch):  # generate needs left padding
            batch = prompts[start : start + args.hf_batch]
            width, longest = max(map(len, batch)), max(output_lens[start : start + args.hf_batch])
            ids = torch.tensor([[0] * (width - len(p)) + p for p in batch], device=device)
            mask = torch.tensor(
                [[0] * (width - len(p)) + [1] * len(p) for p in batch], device=device
            )
            with torch.inference_mode():
                hf.generate(
                    ids,
                    attention_mask=mask,
                    max_new_tokens=longest,
                    min_new_tokens=longest,
                    eos_token_id=None,
                    pad_token_id=0,
                    **how,
                )

    return run


def llamacpp(model: str, args: argparse.Namespace) -> Run:
    from benchmarks.llamacpp import LlamaCpp

    return LlamaCpp(model, args.option).run


def workload(
    num_seqs: int, input_len: tuple[int, int], output_len: tuple[int, int], seed: int | str
) -> tuple[Prompts, list[int]]:
    """Return prompts of random tokens, and output lengths; both lengths are (minimum, maximum)."""
    rng = random.Random(seed)
    prompts = [
        [rng.randint(0, 10000) for _ in range(rng.randint(*input_len))] for _ in range(num_seqs)
    ]
    return prompts, [rng.randint(*output_len) for _ in range(num_seqs)]


def option(text: str) -> tuple[str, Any]:
    """Parse NAME=VALUE; the value is JSON, or else a string."""
    name, _, value = text.partition("=")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value


ENGINES: dict[str, Callable[[str, argparse.Namespace], Run]] = {
    "nanovllm": nanovllm,
    "vllm": vllm,
    "transformers": transformers,
    "llamacpp": llamacpp,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", choices=ENGINES, default="nanovllm")
    parser.add_argument("--model", help="a checkpoint; default: the shape of Qwen3-0.6B")
    parser.add_argument("--load-format", choices=["auto", "dummy"], help="default: dummy")
    parser.add_argument("--num-seqs", type=int, default=256)
    parser.add_argument("--min-input-len", type=int, default=100)
    parser.add_argument("--max-input-len", type=int, default=1024)
    parser.add_argument("--min-output-len", type=int, default=100)
    parser.add_argument("--max-output-len", type=int, default=1024)
    parser.add_argument("--temperature", type=float, default=0.6)
    parser.add_argument("--max-model-len", type=int, default=4096)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--hf-batch", type=int, default=32, help="transformers' batch size")
    parser.add_argument(
        "--option", type=option, action="append", default=[], help="an engine option NAME=VALUE"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object, no progress")
    args = parser.parse_args()
    args.option = dict(args.option)
    args.load_format = args.load_format or "dummy"

    input_len = args.min_input_len, args.max_input_len
    output_len = args.min_output_len, args.max_output_len
    prompts, output_lens = workload(args.num_seqs, input_len, output_len, args.seed)

    with tempfile.TemporaryDirectory() as directory:
        Path(directory, "config.json").write_text(json.dumps(QWEN3_06B), encoding="utf-8")
        start = time.perf_counter()
        run = ENGINES[args.engine](args.model or directory, args)
        startup = time.perf_counter() - start
        sampling = {"temperature": args.temperature}
        run([[1, 2, 3, 4]], [4], sampling)
        start = time.perf_counter()
        run(prompts, output_lens, sampling)
        seconds = time.perf_counter() - start

    tokens_in, tokens_out = sum(map(len, prompts)), sum(output_lens)
    if args.json:
        figures = {
            "engine": args.engine,
            "requests": args.num_seqs,
            "tokens_in": tokens_in,
            "tokens_out": tokens_out,
            "startup_seconds": startup,
            "seconds": seconds,
            "output_tokens_per_second": tokens_out / seconds,
        }
        print(json.dumps(figures))
    else:
        print(
            f"{args.engine}: {args.num_seqs} requests, {tokens_in} tokens in, {tokens_out} out, "
            f"{seconds:.2f} s, {tokens_out / seconds:.1f} output tok/s, ready after {startup:.1f} s"
        )


if __name__ == "__main__":
    main()
