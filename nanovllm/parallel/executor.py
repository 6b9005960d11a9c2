"""The contract of executors, and the choice of one. The engine knows workers only through this
module.

torch is imported only when an executor is made.
"""

import contextlib
import gc
import importlib
import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from nanovllm.core.messages import Schedule, StepResult
from nanovllm.core.worker_info import WorkerInfo
from nanovllm.loading.files import is_gguf
from nanovllm.loading.hub import Checkpoint
from nanovllm.options.config import Config
from nanovllm.options.validation import check_installed
from nanovllm.utils.pages import PageReserve, read_ahead
from nanovllm.utils.process import end_openmp_threads

if TYPE_CHECKING:
    from nanovllm.features.structured.grammar import GrammarCompiler

_MIN_RESERVE = 64 * 2**20  # bytes of weights below which a separate thread gains nothing
_PACKED_BITS = {None: 16, "none": 16, "int8": 8.125, "w8a8": 8.125, "int4": 4.5}
"""Of a packed number and its share of a scale, by the option `quantization`."""

if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=end_openmp_threads)


class Future(Protocol):
    """The result of a launched step."""

    def result(self) -> StepResult:
        """Wait for the step and return its result.

        Raises:
            EngineDeadError: a worker died.
        """
        ...


class Executor(Protocol):
    """Runs steps on all ranks, in the order of the calls."""

    def start(self) -> WorkerInfo:
        """Load the model and allocate the KV pool. Every rank gets the smallest rank's blocks."""
        ...

    def set_grammars(self, compiler: "GrammarCompiler") -> None:
        """Give the ranks what compiles the grammars of requests; before the first of those."""
        ...

    def execute(self, schedule: Schedule) -> Future:
        """Launch a step."""
        ...

    def call_all(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Call `function(runner, *arguments)` on each rank, between two steps; return the results.
        A module's function and its arguments can be sent to other processes.

        Raises:
            NanoVLLMError: a mistake of the user that a rank found: the ranks go on.
            EngineDeadError: a worker died.
        """
        ...

    def check_health(self) -> None:
        """Raise EngineDeadError if a worker has died or the executor was shut down."""
        ...

    def shutdown(self, reason: str = ...) -> None:
        """End the workers and release the model; later calls raise EngineDeadError with `reason`.
        Repeated calls do nothing.
        """
        ...


def make_executor(
    config: Config, checkpoint: Checkpoint, draft: Checkpoint | None = None
) -> Executor:
    """Return the executor for `config`, not yet started: the checkpoints are checked, not loaded.

    Raises:
        CheckpointError, ConfigError: the model, or its draft network, cannot run with `config`.
    """
    by_ray = config.distributed_executor_backend == "ray"
    if by_ray:
        check_installed("ray", "ray", what='distributed_executor_backend="ray"')
    if config.load_format != "dummy":
        read_ahead(_files(checkpoint))  # before torch is imported, which takes a second
    reserve = _reserve(config, checkpoint) if config.runs_in_process else None  # before it, too
    if "torch" not in sys.modules:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(_import_torch).result()
    from nanovllm.parallel.rank_setup import check_networks

    target, drafting = check_networks(config, checkpoint, draft)
    if config.runs_in_process:
        from nanovllm.parallel.in_process import InProcessExecutor

        return InProcessExecutor(target._replace(reserve=reserve), drafting)
    from nanovllm.parallel.rank_executor import RankExecutor

    if by_ray:
        from nanovllm.parallel.ray_ranks import RayRanks

        return RankExecutor(RayRanks(target, drafting))
    from nanovllm.parallel.pipes import PipeRanks

    return RankExecutor(PipeRanks(target, drafting))


def _import_torch() -> None:
    """Import torch and what needs it, and keep Python's garbage collector from looking through what
    they make, now and later: hundreds of thousands of objects that stay.

    Called in a thread of its own, because torch.fx leaves a frame in a cycle, which nobody collects
    then: through it the callers' frames would keep the first LLM of a process.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        importlib.import_module("nanovllm.parallel.rank_setup")
        if was_enabled:
            gc.freeze()
    finally:
        if was_enabled:
            gc.enable()


def _files(checkpoint: Checkpoint) -> list[Path]:
    """Return the files of weights that are there; a checkpoint of the hub may lack them."""
    if is_gguf(checkpoint.path):
        return [checkpoint.path]
    whole = checkpoint.path / "model.safetensors"
    return [whole] if whole.is_file() else sorted(checkpoint.path.glob("model-*.safetensors"))


def _reserve(config: Config, checkpoint: Checkpoint) -> PageReserve | None:
    """Return memory for weights that a CPU packs; None where others are expected."""
    on_cpu = config.device == "cpu" or (
        config.device == "auto" and not Path("/dev/nvidiactl").exists()
    )
    dtype = checkpoint.config.get("dtype", checkpoint.config.get("torch_dtype"))
    is_packed = (
        on_cpu
        and dtype == "bfloat16"
        and config.dtype in ("auto", "bfloat16")
        and config.native_kernels
        and config.load_format != "dummy"
        and config.quantization in _PACKED_BITS
        and "quantization_config" not in checkpoint.config
        and not is_gguf(checkpoint.path)
    )
    if not is_packed:
        return None
    num_bytes = sum(file.stat().st_size for file in _files(checkpoint))
    size = int(num_bytes * _PACKED_BITS[config.quantization] / 16)
    with contextlib.suppress(OSError):  # not so much memory: loading finds what is missing
        return PageReserve(size) if size >= _MIN_RESERVE else None
    return None
