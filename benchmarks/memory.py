"""Peak resident memory of a process that runs versus.py's cases on a CPU, against the memory that
it must keep: the weights at their number of bits, and the KV pool. Linux only.

Without --model: random weights in the shape of Qwen3-0.6B. No case includes loading.
"""

import argparse
import re
import tempfile
from pathlib import Path

from benchmarks.shapes import checkpoint, read_config, weight_bytes
from benchmarks.versus import CASES
from nanovllm import LLM, SamplingParams


def reset_peak() -> None:
    """Set the process's peak to what it holds now (proc_pid_clear_refs(5))."""
    Path("/proc/self/clear_refs").write_text("5")


def peak_megabytes() -> float:
    """Return the peak resident memory since `reset_peak`, in MB of a million bytes."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024 / 1e6


def main() -> None:
    """Run each case and print its peak."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="a checkpoint's directory")
    parser.add_argument("--quantization")
    parser.add_argument("--pool", type=float, default=1200, help="MB for the KV pool")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    args = parser.parse_args()
    directory = tempfile.TemporaryDirectory()
    model, load_format = checkpoint(args.model, directory.name)
    kept = weight_bytes(read_config(model), args.quantization) / 1e6 + args.pool
    llm = LLM(
        model,
        load_format=load_format,
        quantization=args.quantization,
        kv_cache_memory_bytes=int(args.pool * 1e6),
        max_model_len=4096,
    )
    print(f"{args.quantization or 'bfloat16'}: weights and pool are {kept:.0f} MB")
    print("| case | peak, MB | beyond weights and pool |")
    print("| --- | --- | --- |")
    for name in args.cases:
        case = CASES[name]
        prompts, output_lens = case.requests(seed=0)
        params = [
            SamplingParams(max_tokens=length, ignore_eos=True, **case.sampling)  # type: ignore[arg-type]
            for length in output_lens
        ]
        reset_peak()
        llm.generate(prompts, params, use_tqdm=False)
        peak = peak_megabytes()
        print(f"| {name} | {peak:.0f} | {peak - kept:.0f} |", flush=True)


if __name__ == "__main__":
    main()
