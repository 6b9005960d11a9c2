"""How near a tower is to what the machine multiplies: seconds for a picture, part by part, and the
share of the rate of a loop of registers.

The tower is Qwen3-VL's, with random weights in bfloat16; all of a picture's patches attend to each
other. A multiplication and an addition are two operations; norms, activations and rotation count
none. The rates are measured beside each round, and the best counts, as does the quickest round.
"""

import argparse
import time

import torch

from benchmarks.comparison import processor_name
from benchmarks.harness import Table, make_parser
from benchmarks.rates import RateMeter
from benchmarks.step import Clock
from nanovllm.attention.cpu import CPUBackend
from nanovllm.features.vision.qwen import QwenVL
from nanovllm.features.vision.tower import TowerConfig, VisionTower
from nanovllm.kernels.cpu.kernels import CKernels
from nanovllm.loading.loader import init_dummy_weights
from nanovllm.worker.model_loader import WeightForms, default_dtype, use_kernels

TOWERS = {
    "Qwen3.5-0.8B": (12, 768, 3072, 12, 1024),
    "Qwen3-VL-2B": (24, 1024, 4096, 16, 2048),
    "Qwen3-VL-8B": (27, 1152, 4304, 16, 4096),
}
"""Layers, their size, that of their MLPs, heads, and the size of an embedding."""
PATCH = 16


def make_tower(name: str) -> VisionTower:
    """Return the tower of that name, with random weights."""
    layers, hidden, inner, heads, output = TOWERS[name]
    fields = {
        "depth": layers,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_heads": heads,
        "out_hidden_size": output,
        "num_position_embeddings": 2304,
    }
    kernels = CKernels()
    with default_dtype(torch.bfloat16):
        tower = QwenVL({"vision_config": fields}, {}).make_tower()
    use_kernels(tower, kernels)
    init_dummy_weights(tower, 0)
    forms = WeightForms(tower, torch.bfloat16, kernels)
    for module in tower.modules():
        forms.finish(module)
    tower.attention = CPUBackend(tower.attention_spec(torch.bfloat16, torch.device("cpu")))
    return tower.eval().requires_grad_(False)


def operations(config: TowerConfig, patches: int, output: int) -> float:
    """Return the operations for a view, those of its embeddings included."""
    size, group = config.hidden_size, config.merge**2
    layer = config.layer_weights + 2 * patches * size
    merger = size * group * (size * group + output) / group
    return 2 * patches * (config.num_layers * layer + size * 3 * 2 * PATCH**2 + merger)


def encode(tower: VisionTower, side: int) -> float:
    """Return the seconds for a picture of side x side pixels, once it has been cut into patches."""
    rows = side // PATCH
    patches = torch.randn(rows * rows, 3 * 2 * PATCH**2).bfloat16()
    start = time.perf_counter()
    for _ in tower.encode(patches, rows, rows):
        pass
    return time.perf_counter() - start


def measure(name: str, sides: list[int], rounds: int, table: Table) -> None:
    """Add a row to the table for each side of a picture."""
    tower = make_tower(name)
    meter = RateMeter()
    for side in sides:
        best: tuple[float, dict[str, float]] = (float("inf"), {})
        rate = 0.0
        for _ in range(rounds + 1):
            rate = max(rate, meter.measure().multiplying(16))
            clock = Clock()
            with clock.watch_engine():
                best = min(best, (encode(tower, side), dict(clock.spent)), key=lambda each: each[0])
        seconds, spent = best
        done = operations(tower.config, (side // PATCH) ** 2, tower.output_size)
        parts = [1000 * spent.get(part, 0.0) for part in ("products", "attention", "glue")]
        speed = done / seconds / 1e9
        table.row(name, side, seconds, *parts, done / 1e9, speed, f"{speed * 1e9 / rate:.1%}")


def main() -> None:
    """Parse the command line and print the table."""
    parser: argparse.ArgumentParser = make_parser("tower", __doc__, model=False)
    parser.add_argument("--towers", nargs="+", choices=TOWERS, default=list(TOWERS)[:2])
    parser.add_argument("--sides", nargs="+", type=int, default=[512, 1024], help="of pictures")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print(f"{processor_name()}, {args.threads} threads\n")
    parts = ("linears, ms", "attention, ms", "other kernels, ms")
    table = Table("tower", "side", "seconds", *parts, "GFLOP", "GFLOP/s", "share")
    with torch.inference_mode():
        for name in args.towers:
            measure(name, args.sides, args.rounds, table)


if __name__ == "__main__":
    main()
