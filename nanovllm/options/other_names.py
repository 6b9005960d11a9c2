"""Options of vLLM and nano-vllm that are not fields here, and what to use instead.

Tables, which validation.py and flags.py look up for a name or a value that they do not know.
docs/migrating.md shows them.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple


class _AnyValue:
    """Equal to everything."""

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        return True

    def __repr__(self) -> str:
        return "any value"


ANY = _AnyValue()
"""Among the accepted values of an `OtherName`: no value changes anything."""


class OtherName(NamedTuple):
    """A keyword of another library that is not a field here."""

    accepted: tuple[Any, ...]
    """Values that ask for what happens anyway; they change nothing. None is always one."""
    advice: str
    """What to use instead of any other value."""

    def accepts(self, value: Any) -> bool:
        """Whether `value` asks for what happens anyway."""
        if value is None:
            return True
        plain = isinstance(value, bool | int | float | str | list | tuple | dict)
        return plain and any(value == item for item in self.accepted)


def other_names(*rows: tuple[str, tuple[Any, ...], str]) -> dict[str, OtherName]:
    """Return an `OtherName` for each of the names in `rows`: (names, accepted values, advice)."""
    return {
        name: OtherName(accepted, advice)
        for names, accepted, advice in rows
        for name in names.split()
    }


_TEXT_ONLY = "the models here read text only; leave it out"
_STRUCTURED = "use structured_outputs"
_ONE_COMPILER = "grammars are compiled by llguidance; leave it out"
_POOLS = "embed() and score() make vectors and scores of any model; leave it out"
_POOLER = "use PoolingParams, in each request, or the files of sentence-transformers"
_ONE_COPY = "use tensor_parallel_size, or one LLM for each GPU"
_HOST_MEMORY = "use kv_offload_gib: GiB of host memory for KV that leaves the pool"
_WEIGHT_FILES = "weights are read from safetensors and GGUF files; leave it out"
_GRAPHS = "CUDA graphs are captured for all sizes; leave it out, or use enforce_eager=True for none"

_NO_MEDIA = ({}, *({kind: 0} for kind in ("image", "video", "audio")), {"image": 0, "video": 0})
_DRAFT_RANKS = "the draft network runs on the ranks of the model; leave it out"
_DRAFTS_PAY = "drafts are proposed only where they are expected to pay; leave it out"
_IGNORED_MEDIA = "the models here read text only"
_KERNELS = "the device and the model choose the kernels; leave it out"
_STATES = "the model says how its states are kept; leave it out"
_EXPERTS = "each rank has a part of every expert; leave it out"
_BY_RAY = 'use distributed_executor_backend="ray" for several machines'
_NUMA = "use num_threads, and numactl around the program"
_ONE_BATCH = "a step is one batch; leave it out"
_SCHEDULED = "use max_num_batched_tokens and max_num_seqs; a prompt takes what is left of a step"
_OF_SERVER = "it is an option of the server: max_waiting"
_ON_DEVICE = "weights stay on one device; use quantization to make them smaller"
_READ_FAST = "files are read in the way that suits the machine"
_COUNTED = "use get_metrics(), or /metrics of the server"
_TRACED = "use profile_dir and start_profile()"
_LOGGED = "use the module logging, or the options of the server"
_NOT_RETURNED = "nothing of the kind is returned; leave it out"
_ADAPTERS = "an adapter's files say what it changes; leave it out"
_NO_PLUGINS = "no plugin reads requests or answers; leave it out"
_SLEEP = "use sleep(level) and wake_up(tags)"
_RANK_DIES = "a rank that dies ends the engine with an error; leave it out"
_ALL_LAYERS = "it is the same for all layers that keep KV; leave it out"

CONFIG_NAMES = other_names(
    ("trust_remote_code", (True, False), "a checkpoint's own code never runs"),
    ("code_revision", (ANY,), "a checkpoint's own code never runs"),
    ("tokenizer_mode", ("auto", "hf"), "only fast tokenizers are read; save a tokenizer.json"),
    ("tokenizer_revision", (), "use tokenizer with a local directory of that revision"),
    ("hf_token", (), "use the environment variable HF_TOKEN"),
    ("config_format", ("auto", "hf"), "only config.json is read; convert the checkpoint"),
    ("hf_config eos", (), "use hf_overrides to change fields of config.json"),
    ("rope_scaling", ({},), 'use hf_overrides={"rope_scaling": {...}}'),
    ("rope_theta", (), 'use hf_overrides={"rope_theta": ...}'),
    ("model_impl", ("auto", "vllm"), "models run in nanovllm's own code"),
    ("task runner", ("auto", "generate", "embed", "pooling", "score"), _POOLS),
    ("convert", ("auto", "none", "embed"), _POOLS),
    ("pooler_config override_pooler_config", (), _POOLER),
    ("served_model_name", (ANY,), "only a server shows a name"),
    ("model_loader_extra_config", ({},), _WEIGHT_FILES),
    ("ignore_patterns", (["original/**/*"], "original/**/*"), _WEIGHT_FILES),
    ("use_tqdm_on_load", (True,), "use the environment variable TQDM_DISABLE=1"),
    ("block_size", (), "use kvcache_block_size"),
    ("num_gpu_blocks_override", (), "use num_kvcache_blocks"),
    ("swap_space", (0,), _HOST_MEMORY),
    ("kv_offloading_size", (), _HOST_MEMORY),
    ("kv_offloading_backend", ("native",), "use kv_offload_gib or kv_cache_dir"),
    ("cpu_offload_gb", (0,), "weights stay on one device; use quantization to make them smaller"),
    ("calculate_kv_scales", (False,), 'use kv_cache_dtype="int8" for scales, on a CPU'),
    ("kv_transfer_config", (), "use kv_offload_gib, kv_cache_dir, or kv_tier with a class"),
    ("prefix_caching_hash_algo", (ANY,), "a hit compares the tokens themselves"),
    ("disable_sliding_window", (False,), 'use hf_overrides={"use_sliding_window": False}'),
    ("use_v2_block_manager", (True,), "there is one block manager; leave it out"),
    ("enable_chunked_prefill", (True,), "use a max_num_batched_tokens of max_model_len or more"),
    ("num_scheduler_steps", (1,), "steps overlap on a GPU as it is; leave it out"),
    ("async_scheduling", (True, False), "steps overlap on a GPU as it is"),
    ("pipeline_parallel_size data_parallel_size", (1,), _ONE_COPY),
    ("disable_custom_all_reduce", (True, False), "ranks add up with NCCL or gloo"),
    ("enable_expert_parallel", (False,), "each rank has a part of every expert; leave it out"),
    ("max_cpu_loras", (ANY,), "an adapter is read from its files when a slot takes it"),
    ("lora_dtype", ("auto",), "an adapter's numbers are kept as its files have them"),
    ("enable_prompt_embeds", (False,), "give prompts as text or token ids"),
    ("limit_mm_per_prompt", _NO_MEDIA, _TEXT_ONLY),
    ("mm_processor_kwargs", ({},), _TEXT_ONLY),
    ("allowed_local_media_path", ("", []), _TEXT_ONLY),
    ("speculative_model", (), 'use speculative_config={"model": ...}'),
    ("num_speculative_tokens", (), 'use speculative_config={"num_speculative_tokens": ...}'),
    ("ngram_prompt_lookup_max", (), 'use speculative_config={"prompt_lookup_max": ...}'),
    ("ngram_prompt_lookup_min", (), 'use speculative_config={"prompt_lookup_min": ...}'),
    ("guided_decoding_backend", ("auto", "guidance"), _ONE_COMPILER),
    ("structured_outputs_config", ("auto", "guidance", {}, {"backend": "auto"}), _ONE_COMPILER),
    ("reasoning_parser", ("",), "it is an option of the server; leave it out"),
    ("logits_processors", ([],), "use SamplingParams.logits_processors, or logits_rules"),
    ("compilation_config", ({}, 0, 1, 2, 3), _GRAPHS),
    ("max_seq_len_to_capture", (ANY,), "CUDA graphs are captured for all sizes"),
    ("enable_sleep_mode", (True, False), "every engine on a CPU can sleep"),
    ("disable_log_stats", (True, False), "no statistics are logged"),
    ("disable_log_requests enable_log_requests", (True, False), "the server logs a line for each"),
    ("worker_cls", ("auto",), "workers cannot be replaced; leave it out"),
    ("worker_extension_cls", ("",), "workers cannot be replaced; leave it out"),
    ("scheduler_cls", (), "use scheduling_policy or eviction_policy with a class of yours"),
    ("additional_config", ({},), "plugins take no options; leave it out"),
    # Options that few scripts set; each has vLLM's default among what is accepted
    ("model_weights", ("",), "use model"),
    ("hf_config_path", (), "use hf_overrides to change fields of config.json"),
    ("model_class_overrides", ({},), "use model_family with a class of yours"),
    ("quantization_config", (), "leave it out: the checkpoint says it"),
    ("allow_deprecated_quantization", (True, False), "leave it out: the checkpoint says it"),
    ("safetensors_load_strategy", ("lazy", "eager", "prefetch"), f"{_READ_FAST}; leave it out"),
    ("safetensors_prefetch_num_threads safetensors_prefetch_block_size", (ANY,), _READ_FAST),
    ("max_parallel_loading_workers", (ANY,), _READ_FAST),
    ("pt_load_map_location", ("cpu",), "pickle files are never read; leave it out"),
    ("tokens_only", (False,), "use skip_tokenizer_init=True"),
    ("return_sampling_mask", (False,), _NOT_RETURNED),
    ("enable_trace_replay", (False,), _NOT_RETURNED),
    ("aux_output_config", ({},), _NOT_RETURNED),
    ("use_fp64_gumbel", (False,), "a token is drawn by one number of 64 bits; leave it out"),
    ("watermark_config", (), "use SamplingParams.logits_processors"),
    ("engram_config diffusion_config", (), "no model here has such parts; leave it out"),
    ("spec_method spec_model spec_tokens", (), "use speculative_config"),
    ("reasoning_config", ({},), "use reasoning_parser of the server"),
    ("io_processor_plugin reasoning_parser_plugin", (), _NO_PLUGINS),
    ("fail_on_environ_validation", (True, False), "there are no VLLM_ variables"),
    # Where ranks run, and what each has
    ("master_addr", ("127.0.0.1",), _BY_RAY),
    ("master_port", (29501,), _BY_RAY),
    ("nnodes", (1,), _BY_RAY),
    ("node_rank", (0,), _BY_RAY),
    ("device_ids", (), "use the environment variable CUDA_VISIBLE_DEVICES"),
    ("numa_bind", (False,), _NUMA),
    ("numa_bind_nodes numa_bind_cpus", (), _NUMA),
    ("distributed_timeout_seconds cpu_distributed_timeout_seconds", (), _RANK_DIES),
    ("enable_fault_tolerance", (False,), _RANK_DIES),
    ("fault_tolerance_config watchdog_config", ({},), _RANK_DIES),
    ("prefill_context_parallel_size decode_context_parallel_size", (1,), _ONE_COPY),
    ("dcp_kv_cache_interleave_size", (1,), _ONE_COPY),
    ("cp_kv_cache_interleave_size dcp_comm_backend dcp_q_replicate", (), _ONE_COPY),
    ("data_parallel_rank data_parallel_start_rank data_parallel_size_local", (), _ONE_COPY),
    ("data_parallel_address data_parallel_rpc_port", (), _ONE_COPY),
    ("data_parallel_hybrid_lb data_parallel_external_lb", (False,), _ONE_COPY),
    ("data_parallel_multi_port_external_lb enable_hc_sp", (False,), _ONE_COPY),
    ("data_parallel_backend", ("mp",), _ONE_COPY),
    ("dp_sync_interval", (ANY,), _ONE_COPY),
    ("disable_nccl_for_dp_synchronization", (), _ONE_COPY),
    ("enable_ep_weight_filter enable_elastic_ep enable_eplb", (False,), _EXPERTS),
    ("moe_backend", ("auto",), _EXPERTS),
    ("all2all_backend", ("allgather_reducescatter",), _EXPERTS),
    ("elastic_ep_max_dp_size", (), _EXPERTS),
    ("eplb_config", ({},), _EXPERTS),
    ("expert_placement_strategy", ("linear",), _EXPERTS),
    ("enable_batch_sharded_sampling", (), "rank 0 samples; leave it out"),
    ("enable_shm_tensor_arena", (False,), "ranks are sent what changed; leave it out"),
    ("ray_workers_use_nsight", (False,), _TRACED),
    # Kernels and steps
    ("linear_backend sparse_indexer_topk_backend", ("auto",), _KERNELS),
    ("attention_config kernel_config ir_op_priority", ({},), _KERNELS),
    ("enable_flashinfer_autotune", (True, False), _KERNELS),
    ("monokernel", (False,), _KERNELS),
    ("disable_cascade_attn", (True,), _KERNELS),
    ("gdn_prefill_backend", (), _KERNELS),
    ("kda_prefill_backend kda_decode_backend", ("auto",), _KERNELS),
    ("mamba_backend", ("triton",), _KERNELS),
    ("mamba_ssu_algorithm", (), _KERNELS),
    ("mamba_config", ({},), _STATES),
    ("mamba_cache_dtype mamba_ssm_cache_dtype", ("auto",), _STATES),
    ("mamba_block_size mamba_cache_mode prefix_match_unit", (), _STATES),
    ("enable_mamba_shared_prefix_checkpoint use_replayssm", (False,), _STATES),
    ("enable_mamba_cache_stochastic_rounding", (False,), _STATES),
    ("replayssm_buffer_len", (ANY,), _STATES),
    ("mamba_cache_philox_rounds", (0,), _STATES),
    ("enable_dbo", (False,), _ONE_BATCH),
    ("ubatch_size", (0,), _ONE_BATCH),
    ("dbo_decode_token_threshold dbo_prefill_token_threshold", (ANY,), "a step is one batch"),
    (
        "cudagraph_capture_sizes max_cudagraph_capture_size",
        (ANY,),
        "CUDA graphs are captured for all sizes",
    ),
    ("optimization_level", (1, 2, 3), _GRAPHS),
    ("performance_mode", ("balanced",), "use max_num_seqs and max_num_batched_tokens"),
    # Scheduling, KV and memory
    ("max_num_scheduled_tokens", (), "use max_num_batched_tokens"),
    ("max_num_active_seqs", (), "use max_num_seqs"),
    ("long_prefill_token_threshold", (0,), _SCHEDULED),
    ("long_prefill_token_threshold_adaptive", (False,), _SCHEDULED),
    ("prefill_schedule_interval", (1,), _SCHEDULED),
    ("scheduler_reserve_full_isl", (True, False), "a sequence gets KV as it grows"),
    ("watermark", (0.0,), "a sequence gets KV as it grows; leave it out"),
    ("max_num_queued_reqs max_num_queued_tokens", (), _OF_SERVER),
    ("stream_interval", (1,), "a slow reader gets several tokens at once; leave it out"),
    ("prefix_cache_retention_interval", (0,), "the least recently used block goes first"),
    (
        "disable_hybrid_kv_cache_manager",
        (False,),
        "layers with a window keep no more; leave it out",
    ),
    ("swa_bounded_replay", (True,), "layers with a window keep no more; leave it out"),
    ("kv_sharing_fast_prefill", (False,), _ALL_LAYERS),
    ("kv_cache_dtype_skip_layers", ([],), _ALL_LAYERS),
    ("kv_events_config", (), "KV has no events; leave it out"),
    ("offload_backend", ("auto",), _ON_DEVICE),
    ("offload_group_size", (0,), _ON_DEVICE),
    ("offload_num_in_group offload_prefetch_step", (1,), _ON_DEVICE),
    ("cpu_offload_params offload_params", ([],), _ON_DEVICE),
    ("sleep_mode_backend", ("cumem",), _SLEEP),
    ("sleep_mode_offload_cudagraph enable_cumem_allocator", (False,), _SLEEP),
    ("enable_nccl_comm_suspend", (False,), _SLEEP),
    ("sleep_preserve_parameter_names", ([],), _SLEEP),
    ("weight_transfer_config", (), "use update_weights(pairs), which takes tensors of any source"),
    ("fully_sharded_loras specialize_active_lora", (False,), _ADAPTERS),
    ("enable_mixed_moe_lora_format enable_moe_shared_loras", (False,), _ADAPTERS),
    ("lora_target_modules max_lora_cls_labels", (), _ADAPTERS),
    # What is counted, logged and traced
    ("kv_cache_metrics cudagraph_metrics enable_mfu_metrics", (False,), _COUNTED),
    ("kv_cache_metrics_sample", (ANY,), _COUNTED),
    ("per_request_spec_decode_metrics", ("none",), _COUNTED),
    ("show_hidden_metrics_for_version custom_histogram_buckets", (), _COUNTED),
    ("enable_layerwise_nvtx_tracing", (False,), _TRACED),
    ("profiler_config", ({},), _TRACED),
    ("collect_detailed_traces", (), _TRACED),
    ("jit_monitor_mode", (ANY,), "kernels are compiled at start"),
    ("jit_monitor_verbose", (True, False), "kernels are compiled at start"),
    ("otlp_traces_endpoint", (), "use the environment variable OTEL_EXPORTER_OTLP_ENDPOINT"),
    ("enable_logging_iteration_details aggregate_engine_logging", (False,), _LOGGED),
    ("logging_config log_level log_config_file", (), _LOGGED),
    ("shutdown_timeout", (0,), "it is an option of the server: drain_seconds"),
    ("renderer_num_workers", (1,), "a template is rendered in a process of its own; leave it out"),
    # Pictures and sound
    (
        "language_model_only skip_mm_profiling disable_chunked_mm_input",
        (True, False),
        _IGNORED_MEDIA,
    ),
    ("interleave_mm_strings enable_mm_processor_stats", (True, False), _IGNORED_MEDIA),
    ("mm_device_do_normalize", (True, False), _IGNORED_MEDIA),
    (
        "media_io_kwargs allowed_media_domains video_pruning_rate video_pruning_method",
        (ANY,),
        _IGNORED_MEDIA,
    ),
    (
        "mm_processor_cache_gb mm_processor_cache_type mm_shm_cache_max_object_size_mb",
        (ANY,),
        _IGNORED_MEDIA,
    ),
    (
        "mm_hasher_algorithm mm_tensor_ipc mm_processor_device mm_ipc_gpu_memory_gb",
        (ANY,),
        _IGNORED_MEDIA,
    ),
    ("mm_encoder_tp_mode mm_encoder_attn_backend mm_encoder_attn_dtype", (ANY,), _IGNORED_MEDIA),
    ("mm_encoder_fp8_scale_path mm_encoder_fp8_scale_save_path", (ANY,), _IGNORED_MEDIA),
    ("mm_encoder_fp8_scale_save_margin ec_manager_config", (ANY,), _IGNORED_MEDIA),
    ("enable_mm_embeds mm_encoder_only enable_tower_connector_lora", (False,), _TEXT_ONLY),
    ("default_mm_loras ec_transfer_config", (), _TEXT_ONLY),
    ("torch_dtype", ("auto",), "use dtype"),
    ("device_map", ("auto",), "use device, or tensor_parallel_size for several GPUs"),
    ("load_in_8bit", (False,), 'use quantization="int8"'),
    ("load_in_4bit", (False,), 'use quantization="int4"'),
    ("attn_implementation", (ANY,), _KERNELS),
    ("low_cpu_mem_usage", (True, False), _READ_FAST),
    ("cache_dir", (), "use download_dir"),
    ("token use_auth_token", (), "use the environment variable HF_TOKEN"),
    ("n_ctx context_length", (), "use max_model_len"),
    ("n_gpu_layers", (), 'use device="cuda" for all layers on a GPU, or device="cpu" for none'),
    ("mem_fraction_static", (), "use gpu_memory_utilization"),
    ("tp_size", (), "use tensor_parallel_size"),
)
"""Names of vLLM's EngineArgs and of nano-vllm's Config, and of transformers, llama.cpp and SGLang
for the same."""

_CONVERT = 'convert the checkpoint to safetensors and use "auto"'
_UNQUANTIZED = "load the unquantised checkpoint with"
_FROM_CHECKPOINT = "leave it out: the checkpoint says it"

CONFIG_VALUES = {
    "load_format": other_names(
        ("safetensors", (), 'use "auto", which reads safetensors'),
        ("gguf", (), 'use "auto", which recognises a GGUF file'),
        ("pt bitsandbytes", (), _CONVERT),
    ),
    "quantization": other_names(
        ("gguf", (), "leave it out: a GGUF file is recognised"),
        ("awq awq_marlin gptq gptq_marlin compressed-tensors", (), _FROM_CHECKPOINT),
        ("modelopt modelopt_fp4 mxfp4", (), _FROM_CHECKPOINT),
        ("bitsandbytes torchao", (), f'{_UNQUANTIZED} "int4" or "int8"'),
    ),
    "kv_cache_dtype": other_names(
        ("fp8_e4m3", (), 'use "fp8"'),
        ("fp8_e5m2", (), 'use "fp8", which is E4M3'),
        ("bfloat16 float16", (), 'use "auto", the dtype of the model'),
    ),
}
"""By field of Config: values of vLLM's that are not accepted, and what to use."""

_EXACT = "tokens are those without speculation, so there is nothing to set; leave it out"
_LIKE_MODEL = "it is that of the model, for the draft network too; leave it out"
_NO_SUFFIXES = 'use method="ngram", prompt_lookup_max and num_speculative_tokens'
_NO_DRAFT_LAYERS = 'use "ngram", or "eagle3" or "draft_model" with a checkpoint'

SPECULATIVE_NAMES = other_names(
    ("draft_tensor_parallel_size tensor_parallel_size", (), _DRAFT_RANKS),
    ("quantization kv_cache_dtype max_model_len enforce_eager", (), _LIKE_MODEL),
    ("attention_backend", (), _LIKE_MODEL),
    ("revision", (), "use model with a local directory of that revision"),
    ("code_revision", (ANY,), "a checkpoint's own code never runs"),
    ("disable_by_batch_size", (), _DRAFTS_PAY),
    ("acceptance_method rejection_sample_method", (), _EXACT),
    ("speculative_token_tree", (), "drafts are a sequence, not a tree; leave it out"),
    ("prompt_lookup_num_tokens num_assistant_tokens", (), "use num_speculative_tokens"),
    ("max_matching_ngram_size", (), "use prompt_lookup_max"),
    ("assistant_model speculative_model draft_model", (), "use model"),
)
"""Names of vLLM's SpeculativeConfig, and of transformers for the same."""

SPECULATIVE_METHODS = other_names(
    ("suffix", (), _NO_SUFFIXES),
    ("eagle", (), 'EAGLE heads of the third kind only; use "eagle3" with such a head'),
    ("medusa deepseek_mtp", (), _NO_DRAFT_LAYERS),
)
"""Methods of vLLM's that are not here, and what to use."""

_STREAM = "use LLM.stream(prompt), or AsyncLLM.stream: they yield the tokens of each step"
_NO_BEAMS = "beam search is not supported; use n continuations and their cumulative_logprob"

SAMPLING_NAMES = other_names(
    ("stream", (False,), _STREAM),
    ("best_of", (), "use n, and take those of the best cumulative_logprob"),
    ("use_beam_search early_stopping", (False,), _NO_BEAMS),
    ("length_penalty", (1.0,), _NO_BEAMS),
    ("num_beams", (1,), _NO_BEAMS),
    ("guided_decoding response_format", (), _STRUCTURED),
    ("guided_json guided_regex guided_choice guided_grammar", (), _STRUCTURED),
    ("thinking_token_budget", (), "use max_tokens, stop or logits_processors"),
    ("max_new_tokens max_completion_tokens n_predict", (), "use max_tokens"),
    ("stop_sequences stop_strings", (), "use stop"),
    ("do_sample", (True,), "use temperature=0 for greedy sampling"),
    ("num_return_sequences", (), "use n"),
    ("top_logprobs", (), "use logprobs"),
    ("repeat_penalty", (), "use repetition_penalty"),
    ("flat_logprobs", (False,), "log-probabilities are dictionaries by token id"),
    ("skip_clone", (True, False), "parameters never change once made"),
    ("output_text_buffer_length", (ANY,), "it follows from the stop strings"),
    ("skip_reading_prefix_cache", (False,), "give the prompt a cache_salt of its own"),
    ("repetition_detection", (), "use repetition_penalty, or logits_processors"),
    ("logprob_token_ids", (), "use logprobs"),
    ("watermarking", (False,), "use logits_processors"),
    ("prompt_logprob_token_ids", (), "use prompt_logprobs"),
    ("stream_interval", (1,), "a slow reader gets several tokens at once; leave it out"),
    ("routed_experts_prompt_start", (0,), "the experts of tokens are not returned; leave it out"),
    ("trace_decode_token_ids", (), "use prompt_logprobs of the text"),
)
"""Names of vLLM's SamplingParams, and of transformers and OpenAI for the same."""

POOLING_NAMES = other_names(
    ("use_activation softmax activation", (), "use normalize; score() has the model's activation"),
    ("task", ("embed", "score", "classify"), _POOLS),
    ("skip_reading_prefix_cache", (False,), "give the prompt a cache_salt of its own"),
    ("extra_kwargs", ({},), "use the fields of PoolingParams"),
)
"""Names of vLLM's PoolingParams."""

_PROCESSES = "it is about vLLM's own processes and logs; leave it out"

KEYWORDS = other_names(
    ("stream", (False,), _STREAM),
    ("prompt_adapter_request", (), "put the text into the prompt"),
    ("guided_options_request", (), "use SamplingParams(structured_outputs=...)"),
    ("tokenization_kwargs", ({},), "use truncate_prompt_tokens, or give token ids as prompts"),
    ("mm_processor_kwargs", ({},), _TEXT_ONLY),
    ("chat_template_content_format", ("auto", "string"), "content is joined to a string"),
    ("trace_headers", (), "the server reads a request's trace from its headers; leave it out"),
    ("data_parallel_rank", (0,), "there is one copy of the model; leave it out"),
    ("prompt_text", (), 'use {"prompt": text, "prompt_token_ids": ids} as the prompt'),
    ("use_activation", (), "use PoolingParams(normalize=...); scores have the model's activation"),
    ("truncate_prompt_tokens", (), "it is a field of SamplingParams and PoolingParams"),
    ("prompt_token_ids", (), "give token ids as prompts"),
    ("usage_context start_engine_loop stat_loggers log_requests internal", (ANY,), _PROCESSES),
    ("disable_log_requests disable_log_stats enable_multiprocessing", (ANY,), _PROCESSES),
    ("reset_connector", (ANY,), _PROCESSES),
)
"""Keywords of vLLM's methods that the methods here do not have."""

_NOT_RETURNED = "it is not returned; leave it out"
_INERT_ALONE = "it changes nothing alone; leave it out"
_CONFINED = "requests bring no code and choose no process; leave it out"

REQUEST_NAMES = other_names(
    ("regex", (), "use guided_regex"),
    ("ebnf grammar", (), "use guided_grammar"),
    ("json_schema", (), "use guided_json, or response_format"),
    ("stop_regex", (), "use stop"),
    ("no_stop_trim", (False,), "use include_stop_str_in_output"),
    ("lora_path", (), "use model with the name of the adapter"),
    ("lora", ([],), "use model with the name of the adapter"),
    ("rid", (), "use request_id"),
    ("extra_key", (), "use cache_salt"),
    ("separate_reasoning stream_reasoning", (True,), "use include_reasoning"),
    ("reasoning_format", ("auto", "deepseek"), "use include_reasoning"),
    ("thinking_budget_tokens reasoning_budget_tokens", (-1,), "use max_tokens"),
    ("parse_tool_calls", (True,), "use tool_choice"),
    ("n_predict", (), "use max_tokens"),
    ("n_probs", (0,), "use logprobs"),
    ("return_tokens", (False,), "use return_token_ids"),
    ("typical_p tfs_z", (1.0,), "use top_p or min_p"),
    ("mirostat dynatemp_range xtc_probability", (0,), "use temperature, top_p or min_p"),
    ("mirostat_tau mirostat_eta dynatemp_exponent xtc_threshold", (ANY,), _INERT_ALONE),
    ("dry_multiplier", (0,), "use repetition_penalty or frequency_penalty"),
    ("dry_base dry_allowed_length dry_penalty_last_n dry_sequence_breakers", (ANY,), _INERT_ALONE),
    ("repeat_last_n", (-1,), "use repetition_penalty, which counts the whole text"),
    ("samplers", (), "the order is fixed; leave it out"),
    ("cache_prompt", (True,), "use cache_salt to share no prefix"),
    ("n_keep n_discard", (0,), "a prompt that is too long is refused; see truncate_prompt_tokens"),
    ("id_slot", (-1,), _CONFINED),
    ("timings_per_token return_progress", (False,), "use stream_options"),
    ("verbose", (False,), "use return_token_ids, which returns the prompt's too"),
    ("return_hidden_states return_routed_experts", (False,), _NOT_RETURNED),
    ("return_cached_tokens_details return_weight_versions", (False,), _NOT_RETURNED),
    ("custom_logit_processor custom_params session_params", (), _CONFINED),
    ("bootstrap_host bootstrap_port bootstrap_room", (), _CONFINED),
    ("data_parallel_rank routed_dp_rank disagg_prefill_dp_rank", (), _CONFINED),
)
"""Fields of requests to SGLang's, llama.cpp's and vLLM's servers."""

STRUCTURED_NAMES = other_names(
    ("disable_additional_properties", (True,), 'put "additionalProperties": true in the schema'),
    ("whitespace_pattern", (), "use disable_any_whitespace, or a grammar"),
    ("structural_tag", (), "use grammar, such as llguidance.StructTag.to_grammar makes of tags"),
    ("json_schema schema", (), "use json"),
    ("pattern", (), "use regex"),
    ("choices", (), "use choice"),
    ("lark ebnf gbnf", (), "use grammar"),
)
"""Names of vLLM's StructuredOutputsParams, and of other servers for the same."""

_ALWAYS = "it is always on; leave it out"
_NO_COHERE = "there is no route of Cohere's chat; leave it out"
_FINGERPRINT = "system_fingerprint is made of the version and the options; leave it out"
_ONE_SERVER = "one process serves, and GET /health asks it; leave it out"
_TLS = "put a proxy with TLS in front of the server"
_OWN_LOG = "each request is logged in one line, without its text, and probes are not; leave it out"

SERVE_NAMES = other_names(
    ("enable_auto_tool_choice enable_prompt_tokens_details", (True,), _ALWAYS),
    ("disable_fastapi_docs enable_tokenizer_info_endpoint", (True,), _ALWAYS),
    ("enable_request_id_headers log_error_stack", (True,), _ALWAYS),
    ("enable_log_outputs enable_log_deltas", (False,), "answers are never logged; leave it out"),
    ("enable_per_request_metrics", (False,), "the log has the times of each request"),
    ("enable_server_load_tracking", (False,), "GET /metrics and /status.json have the load"),
    ("enable_force_include_usage", (False,), "send stream_options with include_usage"),
    ("sse_keep_alive_interval", (0,), "let the proxy wait longer for an answer to go on"),
    ("reasoning_effort_map", ({},), "use chat_template with one that knows each effort"),
    ("exclude_tools_when_tool_choice_none", (True,), _ALWAYS),
    ("tool_strict_level", ("auto",), 'give a function "strict": true'),
    ("tool_server", (), "clients call tools"),
    ("trust_request_mm_kwargs", (False,), _TEXT_ONLY),
    ("cohere_is_reasoning_model", (True, False), _NO_COHERE),
    ("cohere_format", ("cmd3", "cmd4"), _NO_COHERE),
    ("anthropic_disabled_thinking_effort", ("auto", "none"), "use chat_template"),
    ("fingerprint_mode", ("full", "hash"), _FINGERPRINT),
    ("fingerprint_value", (), _FINGERPRINT),
    ("enable_scale_out", (False,), "the routes /inference and /render are not there"),
    ("enable_offline_docs", (False,), "GET /openapi.json has the schema of all routes"),
    ("enable_flash_late_interaction", (True, False), "there is no late interaction"),
    ("disable_uvicorn_access_log", (True, False), _OWN_LOG),
    ("uvicorn_log_level", ("info",), "use log_level"),
    ("log_config_file", (), "use log_config"),
    ("max_log_len disable_access_log_for_endpoints", (), _OWN_LOG),
    ("chat_template_content_format", ("auto", "string"), "content is joined to a string"),
    ("trust_request_chat_template", (False,), "templates are not taken from requests"),
    ("response_role", ("assistant",), "answers are the assistant's"),
    ("return_tokens_as_token_ids", (False,), "use the request's field return_token_ids"),
    ("tool_parser_plugin", ("",), "use tool_call_parser, or leave it out"),
    ("allowed_origins", (), "use cors_origins"),
    ("allowed_methods allowed_headers", (["*"],), "all are allowed where cors_origins allows"),
    ("allow_credentials", (False,), "use an API key"),
    ("ssl_keyfile ssl_certfile ssl_ca_certs ssl_ciphers", (), _TLS),
    ("enable_ssl_refresh", (False,), _TLS),
    ("ssl_cert_reqs", (0,), _TLS),
    ("h11_max_incomplete_event_size h11_max_header_count", (), "use max_body_bytes for bodies"),
    ("grpc_port", (), "the server speaks HTTP"),
    ("data_parallel_supervisor_port dp_supervisor_probe_interval_s", (), _ONE_SERVER),
    ("dp_supervisor_probe_timeout_s dp_supervisor_probe_failure_threshold", (), _ONE_SERVER),
    ("middleware", (), "put a proxy in front of the server"),
    ("api_server_count", (1,), "one process serves; leave it out"),
    ("headless", (False,), "one process serves; leave it out"),
)
"""Names of vLLM's options of its server."""

OTHER_NAMES: Mapping[str, Mapping[str, OtherName]] = {
    **CONFIG_VALUES,
    "method": SPECULATIVE_METHODS,
    "Config": CONFIG_NAMES,
    "SpeculativeConfig": SPECULATIVE_NAMES,
    "SamplingParams": SAMPLING_NAMES,
    "PoolingParams": POOLING_NAMES,
    "methods": KEYWORDS,
    "StructuredOutputsParams": STRUCTURED_NAMES,
}
"""By class, names that are not fields of it; by field, values that it does not take; keywords."""
