"""How a rank computes: what decides the bits of an answer besides the request and the weights."""

import dataclasses
from pathlib import Path

from nanovllm.core.worker_info import Arithmetic, WorkerInfo
from nanovllm.kernels.cpu import library
from nanovllm.loading.files import is_gguf
from nanovllm.options.plugins import is_plugin
from nanovllm.worker.model_runner import ModelRunner


def with_arithmetic(runner: ModelRunner, info: WorkerInfo) -> WorkerInfo:
    """Return `info` with the arithmetic of a runner whose steps are recorded, if they can be."""
    network = runner.network
    config = runner.config
    names = {backend.name for backend in network.attention.backends}
    in_c = names == {"cpu"} and network.kernels.name == "c"
    in_c = in_c and not is_plugin(config.attention_backend)  # which may have that name, too
    # A step that can be recorded consists of C kernels alone, none of which mixes rows.
    is_invariant = in_c and bool(runner.step_runners) and config.step_runner is None
    kernels = f"C, {library.description()}" if in_c else network.kernels.name
    dtype = str(network.model_config.dtype).removeprefix("torch.")
    stored = None
    if isinstance(network.model_config.quantization_config, dict):
        stored = network.model_config.quantization_config.get("quant_method")
    if stored is None and config.quantization != "none" and is_gguf(Path(config.model)):
        stored = "gguf"
    return dataclasses.replace(
        info,
        arithmetic=Arithmetic(
            batch_invariant=is_invariant,
            dtype=dtype,
            weights=config.quantization or stored or dtype,
            kv_cache=dtype if config.kv_cache_dtype == "auto" else config.kv_cache_dtype,
            kernels=kernels,
            num_ranks=config.tensor_parallel_size,
        ),
    )
