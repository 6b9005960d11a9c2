"""What the fixed order of sums costs: each kernel in C beside itself with a free order.

Free in two ways. The compiler may reorder sums (-fassociative-math). And a sum may be cut, one part
a thread: half the keys of a sequence, or half the inputs of a linear layer, as two rows or two
outputs. What adding up the parts would take is left out, so the cost shown is at most as much.
Sizes are Qwen3-0.6B's; latent attention, where all heads share one KV head, is the worst case.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable

import torch

from benchmarks.harness import Table, make_parser
from nanovllm.kernels.cpu import ops
from nanovllm.kernels.cpu.packed import PackedWeight

FREE = "-fassociative-math -fno-signed-zeros -fno-trapping-math"
_BLOCK = 64
_COPIES = 8
"""Weights and caches that take turns, so that none stays in the processor's cache."""
_CALLS = 200


def linear(rows: int, outputs: int, inputs: int, parts: int = 1) -> Callable[[int], object]:
    """Return a product; in `parts` parts of the inputs, each with outputs of its own."""
    weights = []
    for seed in range(_COPIES):
        generator = torch.Generator().manual_seed(seed)
        weight = torch.randn(outputs * parts, inputs // parts, generator=generator).bfloat16()
        packed = PackedWeight(*weight.shape)
        packed.store(0, weight)
        weights.append(packed)
    x = torch.randn(rows, inputs // parts).bfloat16()
    return lambda turn: weights[turn % _COPIES].apply(x)


def attention(
    keys: int, kv_heads: int, heads: int, dim: int, parts: int = 1
) -> Callable[[int], object]:
    """Return the attention of one token; in `parts` rows of some of the keys."""
    blocks = keys // _BLOCK
    caches = torch.randn(_COPIES, kv_heads, blocks, 2, _BLOCK, dim).bfloat16()
    q = torch.randn(1, heads, dim).bfloat16().repeat(parts, 1, 1)
    tables = torch.arange(blocks, dtype=torch.int32).view(parts, -1)
    starts = torch.arange(parts + 1, dtype=torch.int32)
    lens = torch.full((parts,), keys // parts, dtype=torch.int32)
    return lambda turn: ops.attention(q, caches[turn % _COPIES], tables, starts, lens)


def cases(parts: int) -> dict[str, Callable[[int], object]]:
    """Return what is measured, by name."""
    return {
        "linear, 1 row, 3072 to 1024": linear(1, 1024, 3072, parts),
        "linear, 256 rows, 3072 to 1024": linear(256, 1024, 3072, parts),
        "attention, 4096 keys, 8 KV heads": attention(4096, 8, 16, 128, parts),
        "attention, 4096 keys, 1 KV head": attention(4096, 1, 16, 128, parts),
    }


def measure(parts: int) -> dict[str, float]:
    """Return the least seconds of each case: other processes make a call longer, never shorter."""
    found = {}
    with torch.inference_mode():
        for name, run in cases(parts).items():
            seconds = []
            for turn in range(_CALLS):
                start = time.perf_counter()
                run(turn)
                seconds.append(time.perf_counter() - start)
            found[name] = min(seconds)
    return found


def child(flags: str, parts: int, threads: int) -> dict[str, float]:
    """Measure in a new process, whose kernels are compiled with further flags."""
    compiler = f"{os.environ.get('CC', 'gcc')} {flags}".strip()
    command = [sys.executable, "-m", "benchmarks.exactness.cost", "--parts", str(parts)]
    command += ["--threads", str(threads), "--child"]
    done = subprocess.run(
        command, env={**os.environ, "CC": compiler}, capture_output=True, text=True, check=True
    )
    found: dict[str, float] = json.loads(done.stdout)
    return found


def main() -> None:
    """Print each kernel's time in its fixed order, and in free ones: the least of all rounds."""
    parser = make_parser("exactness.cost", __doc__, model=False)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--parts", type=int, default=1, help=argparse.SUPPRESS)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.child:
        print(json.dumps(measure(args.parts)))
        return
    kinds = {"fixed": ("", 1), "free in the compiler": (FREE, 1), "cut": ("", 2)}
    rounds = [
        {kind: child(*how, args.threads) for kind, how in kinds.items()} for _ in range(args.rounds)
    ]
    table = Table("microseconds", *kinds, "fixed / free", "fixed / cut")
    for name in rounds[0]["fixed"]:
        fixed, free, cut = (1e6 * min(each[kind][name] for each in rounds) for kind in kinds)
        table.row(name, *(f"{each:.1f}" for each in (fixed, free, cut)), fixed / free, fixed / cut)


if __name__ == "__main__":
    main()
