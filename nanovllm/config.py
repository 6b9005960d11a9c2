"""Engine options: frozen, validated, input only.

What is found out at start (block counts, EOS ids, free memory) is returned by what found it and
never written here.
"""

import dataclasses
import os
import re
from typing import Any, ClassVar

from nanovllm.errors import ConfigError, NanoVLLMError
from nanovllm.validation import StrictKeywords, check_bool, check_choice, check_float, check_int

DTYPES = ("auto", "float32", "bfloat16", "float16")
LOAD_FORMATS = ("auto", "dummy")
QUANTIZATIONS = ("int8", "int4", "fp8")
KV_CACHE_DTYPES = ("auto", "fp8", "int8")


@dataclasses.dataclass(frozen=True)
class Config(StrictKeywords):
    """Everything that `LLM(model, **options)` accepts; nano-vllm's names and defaults where it has
    them.

    Raises:
        ConfigError: a field is unknown, of the wrong type, out of range, or at odds with another.
    """

    error: ClassVar[type[NanoVLLMError]] = ConfigError

    model: str
    """A local checkpoint directory, or a Hugging Face hub id such as "Qwen/Qwen3-0.6B"."""
    revision: str | None = None
    """Branch, tag or commit of a hub id; None is its default branch."""
    dtype: str = "auto"
    """Weights and activations: float32, bfloat16, float16; "auto" keeps the checkpoint's."""
    device: str = "auto"
    """"cpu", "cuda" or "cuda:N"; "auto" takes CUDA where there is a GPU."""
    load_format: str = "auto"
    """"auto" reads safetensors; "dummy" makes random weights from config.json alone."""
    quantization: str | None = None
    """"int8" or "int4": keep the weights of linear layers, embedding and head in so many bits;
    "fp8": those of linear layers in FP8 (E4M3)."""
    kv_cache_dtype: str = "auto"
    """"fp8" keeps keys and values in FP8 (E4M3, scale 1) on a GPU, "int8" in integers with a scale
    for each token and head on a CPU; "auto" in the model's dtype."""
    max_num_batched_tokens: int | None = None
    """Most tokens computed in one step; longer prompts are cut into chunks. None is 16384 on CUDA,
    2048 on a CPU."""
    max_num_seqs: int = 512
    """Most sequences that hold a table row and KV blocks at once."""
    max_model_len: int = 4096
    """Most tokens of prompt plus output; cut to what the model's positions allow."""
    gpu_memory_utilization: float = 0.9
    """Share of each GPU's memory that this engine may use, weights included."""
    tensor_parallel_size: int = 1
    """Processes that share each layer; above 1 they are spawned."""
    enforce_eager: bool = False
    """Launch every step kernel by kernel: no CUDA graphs of decode steps, no recorded steps on the
    CPU; less memory, a quicker start, slower decoding."""
    num_threads: int | None = None
    """CPU threads of a step, over all ranks; None takes the cores that this process may use."""
    native_kernels: bool = True
    """Use kernels of our own where there are any, else weights packed by oneDNN on a CPU; False is
    plain torch everywhere."""
    kvcache_block_size: int | None = None
    """Tokens in a KV block; None takes the attention backend's choice."""
    num_kvcache_blocks: int = -1
    """KV blocks in the pool; -1 sizes the pool from memory."""
    kv_cache_memory_bytes: int | None = None
    """Bytes for the KV pool of one rank; None: on CUDA by gpu_memory_utilization, on a CPU the
    smaller of 4 GiB and the rank's share of half the memory free once the weights are loaded."""
    enable_prefix_caching: bool = True
    """Reuse the KV blocks of prompts that begin alike."""
    seed: int = 0
    """Seeds the requests that bring no seed of their own."""

    def __post_init__(self) -> None:
        if not isinstance(self.model, str | os.PathLike) or not os.fspath(self.model):
            raise ConfigError(f"model must be a directory or a hub id, got {self.model!r}")
        self._set("model", os.fspath(self.model))
        if not (self.revision is None or isinstance(self.revision, str)):
            raise ConfigError(f"revision must be a string or None, got {self.revision!r}")
        check_choice(ConfigError, "dtype", self.dtype, DTYPES)
        check_choice(ConfigError, "load_format", self.load_format, LOAD_FORMATS)
        check_choice(ConfigError, "kv_cache_dtype", self.kv_cache_dtype, KV_CACHE_DTYPES)
        if not isinstance(self.device, str) or not re.fullmatch(
            r"auto|cpu|cuda(:\d+)?", self.device
        ):
            raise ConfigError(
                f'device must be "auto", "cpu", "cuda" or "cuda:N", got {self.device!r}'
            )
        for name in ("max_num_seqs", "max_model_len", "tensor_parallel_size"):
            self._set(name, check_int(ConfigError, name, getattr(self, name), 1))
        self._set("seed", check_int(ConfigError, "seed", self.seed, 0, 2**63 - 1))
        if self.quantization is not None:
            check_choice(ConfigError, "quantization", self.quantization, QUANTIZATIONS)
        for name in (
            "max_num_batched_tokens",
            "kvcache_block_size",
            "kv_cache_memory_bytes",
            "num_threads",
        ):
            if getattr(self, name) is not None:
                self._set(name, check_int(ConfigError, name, getattr(self, name), 1))
        if self.num_kvcache_blocks != -1:
            blocks = check_int(ConfigError, "num_kvcache_blocks", self.num_kvcache_blocks, 1)
            self._set("num_kvcache_blocks", blocks)
        utilization = check_float(
            ConfigError, "gpu_memory_utilization", self.gpu_memory_utilization, 0.01, 1.0
        )
        self._set("gpu_memory_utilization", utilization)
        check_bool(ConfigError, "enforce_eager", self.enforce_eager)
        check_bool(ConfigError, "native_kernels", self.native_kernels)
        check_bool(ConfigError, "enable_prefix_caching", self.enable_prefix_caching)
        if self.num_kvcache_blocks != -1 and self.kv_cache_memory_bytes is not None:
            raise ConfigError(
                "num_kvcache_blocks and kv_cache_memory_bytes both size the KV pool; give one"
            )
        if self.tensor_parallel_size > 1 and ":" in self.device:
            raise ConfigError(
                f"device {self.device!r} names one GPU but tensor_parallel_size is "
                f'{self.tensor_parallel_size}; use device="cuda" and CUDA_VISIBLE_DEVICES'
            )

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)
