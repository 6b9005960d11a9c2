"""Engine options: validated when made, never changed afterwards.

Values found at start-up (block counts, EOS ids, free memory) are not stored here; the functions
that find them return them.
"""

import numbers
import os
import re
from collections.abc import Sequence
from typing import Annotated, Any

from nanovllm.errors import CheckpointError, ConfigError
from nanovllm.options.plugins import check_plugin, check_plugins, installed, is_plugin
from nanovllm.options.sampling_params import GENERATION_FIELDS, default_sampling_params
from nanovllm.options.speculative_config import SpeculativeConfig
from nanovllm.options.validation import (
    Error,
    check_choice,
    check_float,
    check_int,
    check_json_object,
    check_path,
    checked_dataclass,
    did_you_mean,
    plain_text,
    shown,
)

DTYPES = ("auto", "float32", "bfloat16", "float16")
LOAD_FORMATS = ("auto", "dummy")
QUANTIZATIONS = ("int8", "int4", "w8a8", "fp8", "none")
EXECUTOR_BACKENDS = ("mp", "uni", "ray")
LOGPROBS_MODES = ("raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits")
KV_CACHE_DTYPES = ("auto", "fp8", "int8", "int4")
SCHEDULING_POLICIES = ("priority", "fcfs")
EVICTION_POLICIES = ("lru",)
PLATFORMS = {"cuda": "nanovllm.platform.cuda:CUDA", "cpu": "nanovllm.platform.cpu:CPU"}
"""What `device` may name; "auto" is the first of these that the machine has."""
MAX_THREADS = 1024
"""Most CPU threads, as in kernels/cpu/csrc/threads.c. OpenMP's library ends the process if it does
not get the threads or their memory."""
_INT32 = 2**31 - 1
"""The largest number in a block table."""
_LEAST_GIB = 2.0**-20
_MAX_GIB = 2.0**30
_NEEDS = {
    "kv_cache_dir_gib": ("kv_cache_dir", "limits what is in kv_cache_dir"),
    "max_loras": ("enable_lora", "is for adapters that requests name"),
    "max_lora_rank": ("enable_lora", "is for adapters that requests name"),
}
"""Options that count only with another one: that one, and what they do."""


def _dtype(error: Error, name: str, value: Any) -> str:
    if type(value).__module__ == "torch":  # such as torch.bfloat16
        value = str(value).removeprefix("torch.")
    elif value in ("half", "float"):  # other names of torch's
        value = "float16" if value == "half" else "float32"
    return check_choice(error, name, value, DTYPES)


def _recommended(error: Error, name: str, value: Any) -> dict[str, Any]:
    given = check_json_object(error, name, value)
    if unknown := [key for key in given if key not in GENERATION_FIELDS]:
        raise error(
            f"{name} has no field {shown(unknown[0])}{did_you_mean(unknown[0], GENERATION_FIELDS)}"
        )
    try:
        default_sampling_params(given)
    except CheckpointError as reason:
        raise error(f"{name}: {str(reason).partition(': ')[2]}") from None
    return given


def _device(error: Error, name: str, value: Any) -> str:
    known = ("auto", *PLATFORMS)
    if isinstance(value, str) and value.partition(":")[0] in known:
        if value in known or re.fullmatch(r"cuda:\d+", value):
            return plain_text(value)
        raise error(f'{name} must be "auto", "cpu", "cuda" or "cuda:N", got {value!r}')
    return check_plugin(error, name, value, "platform", known)


def _threads(error: Error, name: str, value: Any) -> int:
    most = min(max(4 * (os.cpu_count() or 1), 64), MAX_THREADS)
    return check_int(error, name, value, 1, most)


def _blocks(error: Error, name: str, value: Any) -> int:
    is_none = isinstance(value, numbers.Integral) and value == -1
    return -1 if is_none else check_int(error, name, value, 1, _INT32)


def _attention_backend(error: Error, name: str, value: Any) -> str:
    # None is vLLM's default.
    return "auto" if value is None else check_plugin(error, name, value, "backend", ("auto",))


def _quantization(error: Error, name: str, value: Any) -> str:
    is_ours = not isinstance(value, str) or value in QUANTIZATIONS
    if not is_ours and (is_plugin(value) or value in installed("format")):
        return check_plugin(error, name, value, "format")
    return check_choice(error, name, value, QUANTIZATIONS)


def _picture_limit(error: Error, name: str, value: Any) -> dict[str, Any]:
    given = check_json_object(error, name, value)
    for kind, most in given.items():
        if kind not in ("image", "video", "audio", "vision_chunk"):
            raise error(f'{name} has no field {shown(kind)}; it is {{"image": a number}}')
        check_int(error, f"{name}: {kind}", most, 0, _INT32)
    return given


def _speculative_config(error: Error, name: str, value: Any) -> SpeculativeConfig:
    """Return the options of speculation, which may be given as a dictionary."""
    if isinstance(value, SpeculativeConfig):
        return value
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise error(
            f'{name} must be a dictionary of options, such as {{"method": "ngram"}}, '
            f"got {shown(value)}"
        )
    try:
        return SpeculativeConfig(**value)
    except ConfigError as reason:
        raise error(f"{name}: {reason}") from None


@checked_dataclass(ConfigError)
class Config:
    """The options of `LLM(model, **options)`; names and defaults are nano-vllm's where it has them.

    Raises:
        ConfigError: a field is unknown, of the wrong type, out of range, or contradicts another.
    """

    model: Annotated[str, check_path, "a directory or a hub id"]
    """Path of a local checkpoint directory or GGUF file, or a Hugging Face hub id such as
    "Qwen/Qwen3-0.6B", or a GGUF file in a hub repository such as "owner/repo/model.gguf", or
    "demo-vision", which ships with nanovllm."""
    revision: Annotated[str | None, check_path, "a string or None", str] = None
    """Branch, tag or commit of the hub repository; None is its default branch."""
    tokenizer: Annotated[str | None, check_path, "a directory or a hub id or None"] = None
    """Directory or hub id of another tokenizer; None is the model's own."""
    skip_tokenizer_init: bool = False
    """Load no tokenizer: prompts and outputs are token ids, and texts are empty."""
    download_dir: Annotated[str | None, check_path, "a directory or None"] = None
    """Directory for downloads from the hub; None is huggingface_hub's cache."""
    hf_overrides: Annotated[dict[str, Any] | None, check_json_object] = None
    """Fields that replace those of the checkpoint's config.json, such as {"rope_theta": 1000000};
    None is no change."""
    generation_config: Annotated[str, check_path, 'a directory, "auto" or "vllm"'] = "auto"
    """Where recommended sampling parameters come from: "auto" is the checkpoint's
    generation_config.json, "vllm" none; otherwise a directory with that file, which then also names
    the end-of-sequence tokens besides the tokenizer's."""
    override_generation_config: Annotated[dict[str, Any] | None, _recommended] = None
    """Recommended sampling parameters that replace those of generation_config, such as
    {"temperature": 0.6, "max_new_tokens": 512}; None is no change."""
    dtype: Annotated[str, _dtype] = "auto"
    """Data type of weights and activations: "float32", "bfloat16" or "float16"; "auto" keeps the
    checkpoint's, but is bfloat16 for a GGUF file and, on a CPU, for a quantised checkpoint in
    float16."""
    device: Annotated[str, _device] = "auto"
    """Device to run on: "cpu", "cuda", "cuda:N" or your own class, "module:Class";
    "auto" uses CUDA if there is a GPU."""
    load_format: Annotated[str, check_choice, LOAD_FORMATS] = "auto"
    """"auto" loads the weights from safetensors or GGUF files; "dummy" makes random weights and
    needs only config.json."""
    model_family: Annotated[str | None, check_plugin, "family"] = None
    """User-defined model family, as "module:Class". None is the checkpoint's."""
    quantization: Annotated[str | None, _quantization] = None
    """Weight quantization: "int8" and "int4" store linear layers, embedding and language-model head
    in 8 or 4 bits, except those that the checkpoint has in few bits; "w8a8" is "int8" with inputs
    that the C kernels of a CPU round to 8 bits, too; "fp8" stores linear layers in FP8 (E4M3);
    "none" converts the blocks of a GGUF file to the model's dtype; "module:Class" names your own
    `WeightFormat`. None is the form that each weight has in the checkpoint."""
    attention_backend: Annotated[str, _attention_backend] = "auto"
    """Attention backend: "auto" is the first for the device that supports the model; "module:Class"
    names your own `Backend`."""
    kv_cache_dtype: Annotated[str, check_choice, KV_CACHE_DTYPES] = "auto"
    """Data type of the KV cache: "fp8" (E4M3, scale 1; GPU only), "int8" or "int4" (heads are
    rotated, then rounded with scales for each token; CPU only), or "auto" for the model's dtype."""
    max_num_batched_tokens: Annotated[int | None, check_int, 1, _INT32] = None
    """Maximum number of tokens computed in one step; longer prompts are computed in chunks. None is
    16384 on CUDA and 1024 on a CPU."""
    max_num_seqs: Annotated[int, check_int, 1, 2**20] = 512
    """Maximum number of sequences that run at once; each owns a table row and KV blocks."""
    scheduling_policy: Annotated[str, check_plugin, "policy", SCHEDULING_POLICIES] = "priority"
    """Which requests go first: "priority" goes by their priority, then lets users take turns, then
    by arrival; "fcfs" is another name for it; "module:Class" names your own `Policy`."""
    max_model_len: Annotated[int, check_int, 1, _INT32] = 4096
    """Maximum length of a sequence, prompt and output together. A value above the model's number of
    positions is reduced to it."""
    gpu_memory_utilization: Annotated[float, check_float, 0.01, 1.0] = 0.9
    """Fraction of each GPU's memory that this engine may use, weights included. On a CPU it is a
    fraction of the machine's memory, and bounds the KV pool alone."""
    tensor_parallel_size: Annotated[int, check_int, 1, 1024] = 1
    """Number of processes that share each layer; above 1, each is a spawned process."""
    distributed_executor_backend: Annotated[str | None, check_choice, EXECUTOR_BACKENDS] = None
    """Where the processes that share layers run: "mp" spawns them on this machine, "ray" lets Ray
    place them, even a single one, also on other machines; "uni" is this process alone. None is
    this process for one, and mp for several."""
    step_runner: Annotated[str | None, check_plugin, "runner"] = None
    """Your own `StepRunner`, as "module:Class", for the steps that fit it; None disables it."""
    enforce_eager: bool = False
    """Run every step kernel by kernel, without CUDA graphs or recorded steps on the CPU. This takes
    less memory and starts faster, but decodes slower."""
    num_threads: Annotated[int | None, _threads] = None
    """Number of CPU threads of all ranks together; None is the number of cores available to this
    process."""
    native_kernels: bool = True
    """Use nanovllm's own kernels where available, and on a CPU without them weights packed by
    oneDNN. Otherwise plain torch is used everywhere."""
    kvcache_block_size: Annotated[int | None, check_int, 1, _INT32] = None
    """Number of tokens in a KV block; None is the attention backend's choice."""
    num_kvcache_blocks: Annotated[int, _blocks] = -1
    """Number of KV blocks in the pool; -1 derives it from the available memory."""
    kv_cache_memory_bytes: Annotated[int | None, check_int, 1, 2**63 - 1] = None
    """Size of each rank's KV pool in bytes. None is what gpu_memory_utilization leaves on CUDA; on
    a CPU it is 4 GiB or the rank's share of half the memory that is free after loading the weights,
    whichever is smaller."""
    enable_prefix_caching: bool = True
    """Reuse the KV blocks of prefixes that prompts share."""
    eviction_policy: Annotated[str, check_plugin, "eviction", EVICTION_POLICIES] = "lru"
    """Which cached KV makes room when the pool is full: "lru" is the least recently used, or
    "module:Class" names your own `EvictionOrder`."""
    kv_offload_gib: Annotated[float | None, check_float, _LEAST_GIB, _MAX_GIB] = None
    """GiB of host memory, of all ranks together, for cached KV that leaves the pool: a prefix hit
    or a preempted sequence gets it back from there. None is off."""
    kv_cache_dir: Annotated[str | None, check_path, "a directory or None"] = None
    """Directory that keeps the KV of prompts between processes; made if it is not there. A later
    engine with the same model and options finds the prefixes there. None disables it."""
    kv_cache_dir_gib: Annotated[float, check_float, _LEAST_GIB, _MAX_GIB] = 16.0
    """Limit in GiB for the files in kv_cache_dir; the least recently used go first."""
    kv_store: Annotated[str | None, check_plugin, "tier"] = None
    """Your own `ByteStore`, as "module:Class", for the KV of prompts in place of kv_cache_dir;
    None disables it."""
    max_logprobs: Annotated[int, check_int, -1, _INT32] = 1000
    """Maximum number of log-probabilities that a request may ask for at each token; -1 is the size
    of the vocabulary."""
    speculative_config: Annotated[
        SpeculativeConfig | dict[str, Any] | None, _speculative_config
    ] = None
    """Speculative decoding: how to propose tokens, of which one step verifies several. The options
    are method, model, num_speculative_tokens, prompt_lookup_max and prompt_lookup_min, as in
    {"method": "ngram"}; None is off."""
    enable_lora: bool = False
    """Let each request name a LoRA adapter."""
    max_loras: Annotated[int, check_int, 1, 1024] = 1
    """Maximum number of adapters whose requests run at once; each has a slot in memory, of
    max_lora_rank. Requests with further adapters wait, and any number may be known."""
    max_lora_rank: Annotated[int, check_int, 1, 512] = 16
    """Maximum rank of an adapter that a request names."""
    mmproj: Annotated[str | None, check_path, "a GGUF file or None"] = None
    """GGUF file that reads pictures for the model, which is one, too; also one of a hub repository.
    None is the one beside the model's."""
    limit_mm_per_prompt: Annotated[dict[str, Any] | None, _picture_limit] = None
    """Maximum number of pictures in a prompt, as {"image": 4}; with 0, what reads pictures is not
    loaded. None is no limit."""
    mm_processor_kwargs: Annotated[dict[str, Any] | None, check_json_object] = None
    """How pictures are resized, by the model's own options, such as {"max_pixels": 1000000}; a
    prompt's own go first. None is as the checkpoint says."""
    max_image_tokens: Annotated[int | None, check_int, 1, _INT32] = None
    """Maximum number of tokens that a picture may take: larger ones are refused. None is what fits
    into max_model_len."""
    encoder_cache_mib: Annotated[int, check_int, 1, _INT32] = 256
    """MiB of memory for pictures that are encoded, of each rank: those of a request must fit, and
    others stay until there is no room."""
    trace_file: Annotated[str | None, check_path, "a file or None"] = None
    """File for a timeline of the engine's steps and of each sequence, which ui.perfetto.dev shows;
    an existing file is overwritten. None is off."""
    profile_dir: Annotated[str | None, check_path, "a directory or None"] = None
    """Directory for the files of profiles, which begin and end while the engine runs; made if it is
    not there. None disables profiling."""
    logits_rules: Annotated[Sequence[str], check_plugins, "rule"] = ()
    """One or more of your own `LogitsRule` classes, as "module:Class". A request asks for one by
    name in extra_args."""
    logprobs_mode: Annotated[str, check_choice, LOGPROBS_MODES] = "raw_logprobs"
    """What requests for log-probabilities get: raw values are the model's own; processed ones, of
    sampled tokens, are taken after rules, temperature and filters, with -inf for tokens that are
    ruled out. Logits are not normalised."""
    enable_return_routed_experts: bool = False
    """Return which experts each token had, for models that have experts. Steps then run layer by
    layer, and no prefix is taken from the cache."""
    seed: Annotated[int, check_int, 0, 2**63 - 1] = 0
    """Seed for requests without a seed, and for dummy weights."""

    @property
    def speculation(self) -> SpeculativeConfig | None:
        """`speculative_config`, which is no longer a dictionary once the options are checked."""
        assert not isinstance(self.speculative_config, dict)
        return self.speculative_config

    @property
    def runs_in_process(self) -> bool:
        """Whether the model runs in this process."""
        return self.tensor_parallel_size == 1 and self.distributed_executor_backend != "ray"

    def __post_init__(self) -> None:
        if self.tokenizer is not None and self.skip_tokenizer_init:
            raise ConfigError("skip_tokenizer_init=True loads no tokenizer; leave tokenizer out")
        if self.num_kvcache_blocks != -1 and self.kv_cache_memory_bytes is not None:
            raise ConfigError(
                "num_kvcache_blocks and kv_cache_memory_bytes both size the KV pool; give one"
            )
        self._check_needs()
        if self.enable_return_routed_experts and (self.has_tiers or self.step_runner):
            raise ConfigError(
                "enable_return_routed_experts has each token computed, layer by layer: leave it "
                "out, or step_runner and the tiers of the prefix cache"
            )
        if self.tensor_parallel_size > 1 and self.names_one_gpu:
            raise ConfigError(
                f"device {self.device!r} names one GPU but tensor_parallel_size is "
                f'{self.tensor_parallel_size}; use device="cuda" and CUDA_VISIBLE_DEVICES'
            )
        if self.tensor_parallel_size > 1 and self.distributed_executor_backend == "uni":
            raise ConfigError(
                'distributed_executor_backend "uni" is this process alone, but '
                f"tensor_parallel_size is {self.tensor_parallel_size}; leave one of them out"
            )
        if self.names_one_gpu and self.distributed_executor_backend == "ray":
            raise ConfigError(
                f"device {self.device!r} names one GPU, but with distributed_executor_backend "
                '"ray" it is Ray that chooses; use device="cuda"'
            )

    @property
    def names_one_gpu(self) -> bool:
        """Whether `device` has the number of a GPU."""
        return self.device.rpartition(":")[2].isdecimal()

    @property
    def has_tiers(self) -> bool:
        """Whether KV that is in the prefix cache is also kept outside the pool."""
        return self.kv_offload_gib is not None or self.has_store

    @property
    def has_store(self) -> bool:
        """Whether KV is kept between processes."""
        return self.kv_cache_dir is not None or self.kv_store is not None

    def _check_needs(self) -> None:
        """Raise ConfigError for an option that is given without another one."""
        for name, (needed, what) in _NEEDS.items():
            value = getattr(self, name)
            given = getattr(self, needed)
            if not given and value != type(self).__dataclass_fields__[name].default:
                raise ConfigError(
                    f"{name} {value:g} {what}, but {needed} is {given}: give {needed} too, or "
                    f"leave {name} out"
                )
        if self.kv_cache_dir is not None and self.kv_store is not None:
            raise ConfigError("kv_cache_dir and kv_store both keep the KV of prompts: give one")
        if self.has_tiers and not self.enable_prefix_caching:
            names = ("kv_offload_gib", "kv_cache_dir", "kv_store")
            given = next(name for name in names if getattr(self, name) is not None)
            raise ConfigError(
                f"{given} keeps what the prefix cache holds, but enable_prefix_caching is False: "
                "leave one of both out"
            )
