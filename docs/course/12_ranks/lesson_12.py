"""Lesson 12: a layer divided between two processes, which add up their results."""

import multiprocessing
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch.nn.functional import silu

from nanovllm import demo_model

LAYER = "model.layers.0.mlp."
SIZE = 2
"""How many processes share the layer."""


def load_mlp() -> list[torch.Tensor]:
    """Return the matrices gate [384, 128], up [384, 128] and down [128, 384] of the model."""
    [file] = Path(demo_model.MODEL).glob("*.safetensors")
    weights = load_file(file)
    return [weights[f"{LAYER}{name}_proj.weight"].float() for name in ("gate", "up", "down")]


def mlp(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """Return the layer's output for tokens x [tokens, 128]."""
    return (silu(x @ gate.T) * (x @ up.T)) @ down.T


def shard(weights: list[torch.Tensor], rank: int) -> list[torch.Tensor]:
    """Return the part of a rank: rows of gate and up, and the columns of down that read them."""
    gate, up, down = weights
    return [gate.chunk(SIZE)[rank], up.chunk(SIZE)[rank], down.chunk(SIZE, dim=1)[rank]]


def run_rank(rank: int, folder: str, results: Any) -> None:
    """Compute a rank's part, in a process of its own."""
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # they are on one machine
    where = f"file://{folder}/meeting"
    torch.distributed.init_process_group("gloo", where, rank=rank, world_size=SIZE)
    part = mlp(make_input(), *shard(load_mlp(), rank))
    alone = part.norm().item()
    torch.distributed.all_reduce(part)  # adds up the parts of all ranks: now each has the sum
    results.put((rank, alone, part.tolist()))
    torch.distributed.destroy_process_group()


def make_input() -> torch.Tensor:
    """Return three made-up tokens, [3, 128]: the same ones in each process."""
    return torch.randn(3, 128, generator=torch.Generator().manual_seed(0))


def run() -> dict[int, tuple[float, list[list[float]]]]:
    """Return for each rank the length of its own part, and the sum that it has in the end."""
    if sys.platform == "win32":
        sys.exit("This lesson forks processes, which Windows cannot: run it in WSL.")
    context = multiprocessing.get_context("fork")
    results: Any = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            context.Process(target=run_rank, args=(rank, folder, results)) for rank in range(SIZE)
        ]
        for process in ranks:
            process.start()
        found = {rank: (alone, total) for rank, alone, total in (results.get() for _ in ranks)}
        for process in ranks:
            process.join()
    return found


def main() -> None:
    found = run()
    weights = load_mlp()
    for rank in range(SIZE):
        shapes = [list(part.shape) for part in shard(weights, rank)]
        print(f"rank {rank} has gate, up, down:", *shapes)
    whole = mlp(make_input(), *weights)
    for rank, (alone, total) in sorted(found.items()):
        is_same = torch.allclose(torch.tensor(total), whole, atol=1e-4)
        print(f"rank {rank}: its part alone {alone:.2f}, the sum equals the whole: {is_same}")
    print(f"the whole: {whole.norm():.2f}")


if __name__ == "__main__":
    main()
