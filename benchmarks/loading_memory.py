"""Peak resident memory while a checkpoint is loaded on a CPU, against what its weights finally
take. Linux only.

A fresh process loads the shipped model, then the measured one. Its peak is counted from what it
holds in between: the interpreter and the libraries. So the ratio covers the chunks that are read,
the rounding, and pages of mapped files.
"""

import argparse
import gc
import json
import re
import subprocess
import sys
from pathlib import Path

from torch import nn

from benchmarks.harness import Table, make_parser
from benchmarks.work import tensors_in
from nanovllm import demo_model
from nanovllm.layers.linear import WeightModule
from nanovllm.loading.hub import open_checkpoint
from nanovllm.options.config import Config
from nanovllm.parallel import executor
from nanovllm.parallel.rank_setup import check_networks
from nanovllm.platform.cpu import CPU
from nanovllm.worker.network import Network


def resident(field: str) -> int:
    """Return `field` of this process's status, in bytes: "VmRSS", or the peak "VmHWM"."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    found = re.search(rf"{field}:\s+(\d+) kB", status)
    assert found is not None
    return int(found[1]) * 1024


def weight_bytes(model: nn.Module) -> int:
    """Return the bytes of all weights of a loaded model, each once."""
    found = [*model.parameters(), *model.buffers()]
    for module in model.modules():
        if isinstance(module, WeightModule) and module.method is not None:
            found += tensors_in(module.method)
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in found}
    return sum(storages.values())


def _network(config: Config) -> Network:
    checkpoint = open_checkpoint(config.model)
    reserve = executor._reserve(config, checkpoint)
    spec, _ = check_networks(config, checkpoint)
    return Network(spec._replace(reserve=reserve), 512, CPU())


def load(model: str, quantization: str | None) -> dict[str, int]:
    """Load a model in this process; return the bytes of its weights, and of the peak."""
    config = Config(model, quantization=quantization, max_model_len=512, device="cpu")
    _network(Config(demo_model.MODEL, quantization=quantization, device="cpu"))  # the libraries
    gc.collect()
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # the peak is what it holds now
    network = _network(config)
    peak = resident("VmHWM") - before
    gc.collect()
    return {
        "weights": weight_bytes(network.model),
        "peak": peak,
        "left": resident("VmRSS") - before,
    }


def measure(model: str, quantization: str | None) -> dict[str, int]:
    """Return what `load` returns in a fresh process."""
    command = [sys.executable, "-m", "benchmarks.loading_memory", "--child", "--model", model]
    if quantization is not None:
        command += ["--quantization", quantization]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    found: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    """Print a row for each form."""
    parser = make_parser("loading_memory", __doc__, model=False, rounds=None)
    parser.add_argument("--model", required=True, help="a checkpoint's directory or a GGUF file")
    parser.add_argument("--quantization", nargs="*", default=[None], help="int8, int4, fp8, none")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(load(args.model, args.quantization[0])))
        return
    table = Table("quantization", "weights, MB", "peak, MB", "peak / weights", "held, MB")
    for quantization in args.quantization:
        found = measure(args.model, quantization)
        weights, peak, left = (found[key] / 1e6 for key in ("weights", "peak", "left"))
        table.row(quantization, weights, peak, f"{peak / weights:.3f}", left)


if __name__ == "__main__":
    main()
