"""Names of other engines that are not here: which values change nothing, and what to use instead.

A table only. Each place where a name comes in asks it for a name that it does not know, and else
says that the name is unknown, and which one was meant.
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
_EMPTY: tuple[Any, ...] = ({}, [], "")

_BEAMS = "beam search is not supported; use n continuations and their cumulative_logprob"
_CHECKPOINT_SAYS = "leave it out: the checkpoint says it"
_CLASSIFIERS = "there are no classifiers; score() and POST /v1/score have the scores of rerankers"
_CONFIG = (
    "llm.engine.config has the options, and llm.engine.worker_info what was found, such as "
    "max_model_len"
)
_DEVICE = 'use device="cuda" or device="cpu", and tensor_parallel_size for several GPUs'
_GRAPHS = "CUDA graphs are captured for all sizes; leave it out, or use enforce_eager=True for none"
_ONE_COPY = "use tensor_parallel_size, or one LLM or server for each GPU"
_NO_CODE = "the workers run no code of the caller: update_weights() gives them weights"
_STATUS = "use GET /v1/models, /metrics or /status.json"
_STREAM = "use LLM.stream(prompt), or AsyncLLM.stream: they yield the tokens of each step"
_STRUCTURED = 'use structured_outputs, such as {"json": ...}, {"regex": ...} or {"grammar": ...}'
_TEXT_ONLY = "the models here read and write text only"

REMEDIES: Mapping[str, str] = {
    name: remedy
    for names, remedy in {
        # Options
        "block_size": "use kvcache_block_size",
        "num_gpu_blocks_override": "use num_kvcache_blocks",
        "swap_space kv_offloading_size": "use kv_offload_gib: GiB of host memory for KV",
        "kv_transfer_config": "use kv_offload_gib, kv_cache_dir, or kv_store with a class",
        "cpu_offload_gb": "weights stay on one device; use quantization to make them smaller",
        "pipeline_parallel_size data_parallel_size": _ONE_COPY,
        "enable_expert_parallel": "each rank has a part of every expert; leave it out",
        "nnodes node_rank master_addr": 'use distributed_executor_backend="ray"',
        "hf_token token use_auth_token": "use the environment variable HF_TOKEN",
        "tokenizer_revision": "use tokenizer with a local directory of that revision",
        "rope_scaling rope_theta hf_config": "use hf_overrides to change fields of config.json",
        "task runner": "embed() and score() make vectors and scores of any model; leave it out",
        "speculative_model num_speculative_tokens": 'use speculative_config={"model": ...}',
        "compilation_config optimization_level": _GRAPHS,
        "enable_chunked_prefill": "use a max_num_batched_tokens of max_model_len or more",
        "limit_mm_per_prompt mm_processor_kwargs": f"{_TEXT_ONLY}; leave it out",
        "torch_dtype": "use dtype",
        "load_in_8bit load_in_4bit": 'use quantization="int8" or quantization="int4"',
        "cache_dir": "use download_dir",
        "n_ctx ctx_size context_length": "use max_model_len",
        "n_gpu_layers device_map": _DEVICE,
        "mem_fraction_static": "use gpu_memory_utilization",
        "tp_size": "use tensor_parallel_size",
        "ssl_keyfile ssl_certfile": "put a proxy with TLS in front of the server",
        "allowed_origins": "use cors_origins",
        # Values of options
        """quantization=awq quantization=awq_marlin quantization=gptq quantization=gptq_marlin
        quantization=compressed-tensors quantization=modelopt""": _CHECKPOINT_SAYS,
        "quantization=bitsandbytes": 'load the unquantised checkpoint with "int4" or "int8"',
        "load_format=safetensors load_format=gguf quantization=gguf": "leave it out: files say it",
        "kv_cache_dtype=fp8_e4m3 kv_cache_dtype=fp8_e5m2": 'use "fp8", which is E4M3',
        "method=eagle method=medusa": 'use "ngram", or "eagle3" or "draft_model" with a model',
        # Sampling parameters, fields of requests and keywords of methods
        "best_of": "use n, and take those of the best cumulative_logprob",
        "use_beam_search num_beams length_penalty early_stopping beam_search": _BEAMS,
        "guided_json guided_regex guided_choice guided_grammar guided_decoding": _STRUCTURED,
        "regex ebnf grammar json_schema response_format GuidedDecodingParams": _STRUCTURED,
        "structural_tag": "use grammar, such as llguidance.StructTag.to_grammar makes of tags",
        "max_new_tokens max_completion_tokens n_predict": "use max_tokens",
        "stop_sequences stop_strings": "use stop",
        "do_sample": "use temperature=0 for greedy sampling",
        "num_return_sequences": "use n",
        "repeat_penalty": "use repetition_penalty",
        "typical_p tfs_z mirostat xtc_probability": "use temperature, top_p or min_p",
        "stream": _STREAM,
        "tokenization_kwargs": "use truncate_prompt_tokens, or give token ids as prompts",
        "truncate_prompt_tokens": "it is a field of SamplingParams and PoolingParams",
        "use_activation": "use PoolingParams(normalize=...); scores have the model's activation",
        "functions function_call": "use tools and tool_choice",
        "chat_template": "templates are not taken from requests; use chat_template_kwargs",
        "conversation": "use previous_response_id, or send the whole conversation",
        # Methods, imports and routes
        "encode": "use embed(), whose outputs have outputs.embedding",
        "classify /classify /v1/classify": _CLASSIFIERS,
        "collective_rpc apply_model": _NO_CODE,
        "add_lora remove_lora list_loras": "give requests lora_request=LoRARequest(name, id, path)",
        "model_config vllm_config get_model_config get_vllm_config": _CONFIG,
        "EngineArgs AsyncEngineArgs LLMEngine llm_engine from_engine_args": "nanovllm.vllm has it",
        "/api/chat /api/generate /completion /generate": "use POST /v1/chat/completions",
        "/v1": "routes begin with it: it belongs to the address that a client is given",
        "/embed /embedding /api/embed /api/embeddings": "use POST /v1/embeddings",
        "/api/tags /api/show /props /slots /info /load /get_server_info": _STATUS,
        "/v1/audio/speech /v1/audio/transcriptions /v1/images/generations": _TEXT_ONLY,
        "/v1/files /v1/batches": "use `nanovllm batch`, which takes OpenAI's files of requests",
    }.items()
    for name in names.split()
}
"""By name: what to use instead. A value of an option is named option=value."""


class OtherName(NamedTuple):
    """A keyword of another library that is not a field here."""

    accepted: tuple[Any, ...]
    """Values that ask for what happens anyway; they change nothing. None is always one."""
    remedy: str | None
    """What to do instead of giving another value; None: the name is as one that is unknown."""

    def accepts(self, value: Any) -> bool:
        """Whether `value` asks for what happens anyway."""
        if value is None:
            return True
        plain = isinstance(value, bool | int | float | str | list | tuple | dict)
        return plain and any(value == item for item in self.accepted)


def other_names(rows: Mapping[str, tuple[Any, ...]]) -> dict[str, OtherName]:
    """Return an `OtherName` for each of the names in `rows`: names, and their accepted values."""
    return {
        name: OtherName(accepted, REMEDIES.get(name, "leave it out" if accepted else None))
        for names, accepted in rows.items()
        for name in names.split()
    }


OTHER_NAMES: Mapping[str, Mapping[str, OtherName]] = {
    "Config": other_names(
        {
            """code_revision served_model_name prefix_caching_hash_algo max_cpu_loras
            max_seq_len_to_capture safetensors_prefetch_num_threads
            safetensors_prefetch_block_size max_parallel_loading_workers dp_sync_interval
            replayssm_buffer_len dbo_decode_token_threshold dbo_prefill_token_threshold
            cudagraph_capture_sizes max_cudagraph_capture_size kv_cache_metrics_sample
            jit_monitor_mode media_io_kwargs allowed_media_domains video_pruning_rate
            video_pruning_method mm_processor_cache_gb mm_processor_cache_type
            mm_shm_cache_max_object_size_mb mm_hasher_algorithm mm_tensor_ipc mm_processor_device
            mm_ipc_gpu_memory_gb mm_encoder_tp_mode mm_encoder_attn_backend mm_encoder_attn_dtype
            mm_encoder_fp8_scale_path mm_encoder_fp8_scale_save_path
            mm_encoder_fp8_scale_save_margin ec_manager_config attn_implementation""": (ANY,),
            """tokenizer_revision hf_token hf_config eos rope_theta pooler_config
            override_pooler_config block_size num_gpu_blocks_override kv_offloading_size
            kv_transfer_config speculative_model num_speculative_tokens ngram_prompt_lookup_max
            ngram_prompt_lookup_min scheduler_cls hf_config_path quantization_config
            watermark_config engram_config diffusion_config spec_method spec_model spec_tokens
            io_processor_plugin reasoning_parser_plugin device_ids numa_bind_nodes numa_bind_cpus
            distributed_timeout_seconds cpu_distributed_timeout_seconds
            cp_kv_cache_interleave_size dcp_comm_backend dcp_q_replicate data_parallel_rank
            data_parallel_start_rank data_parallel_size_local data_parallel_address
            data_parallel_rpc_port disable_nccl_for_dp_synchronization elastic_ep_max_dp_size
            enable_batch_sharded_sampling gdn_prefill_backend mamba_ssu_algorithm mamba_block_size
            mamba_cache_mode prefix_match_unit max_num_scheduled_tokens max_num_active_seqs
            max_num_queued_reqs max_num_queued_tokens kv_events_config weight_transfer_config
            lora_target_modules max_lora_cls_labels show_hidden_metrics_for_version
            custom_histogram_buckets collect_detailed_traces otlp_traces_endpoint logging_config
            log_level log_config_file default_mm_loras ec_transfer_config cache_dir token
            use_auth_token n_ctx context_length n_gpu_layers mem_fraction_static tp_size
            ctx_size""": (),
            """rope_scaling model_loader_extra_config mm_processor_kwargs allowed_local_media_path
            reasoning_parser logits_processors worker_extension_cls additional_config
            model_weights model_class_overrides aux_output_config reasoning_config
            fault_tolerance_config watchdog_config eplb_config attention_config kernel_config
            ir_op_priority mamba_config kv_cache_dtype_skip_layers cpu_offload_params
            offload_params sleep_preserve_parameter_names profiler_config""": _EMPTY,
            """trust_remote_code async_scheduling disable_custom_all_reduce enable_sleep_mode
            disable_log_stats disable_log_requests enable_log_requests
            allow_deprecated_quantization fail_on_environ_validation enable_flashinfer_autotune
            scheduler_reserve_full_isl jit_monitor_verbose language_model_only skip_mm_profiling
            disable_chunked_mm_input interleave_mm_strings enable_mm_processor_stats
            mm_device_do_normalize low_cpu_mem_usage""": (True, False),
            """calculate_kv_scales disable_sliding_window enable_expert_parallel
            enable_prompt_embeds tokens_only return_sampling_mask enable_trace_replay
            use_fp64_gumbel numa_bind enable_fault_tolerance data_parallel_hybrid_lb
            data_parallel_external_lb data_parallel_multi_port_external_lb enable_hc_sp
            enable_ep_weight_filter             enable_elastic_ep enable_eplb
            enable_shm_tensor_arena ray_workers_use_nsight             monokernel
            enable_mamba_shared_prefix_checkpoint use_replayssm
            enable_mamba_cache_stochastic_rounding enable_dbo
            long_prefill_token_threshold_adaptive disable_hybrid_kv_cache_manager
            kv_sharing_fast_prefill sleep_mode_offload_cudagraph enable_cumem_allocator
            enable_nccl_comm_suspend fully_sharded_loras specialize_active_lora
            enable_mixed_moe_lora_format enable_moe_shared_loras kv_cache_metrics
            cudagraph_metrics enable_mfu_metrics enable_layerwise_nvtx_tracing
            enable_logging_iteration_details aggregate_engine_logging enable_mm_embeds
            mm_encoder_only enable_tower_connector_lora load_in_8bit load_in_4bit""": (False,),
            """use_tqdm_on_load use_v2_block_manager enable_chunked_prefill disable_cascade_attn
            swa_bounded_replay""": (True,),
            """swap_space cpu_offload_gb node_rank mamba_cache_philox_rounds ubatch_size
            long_prefill_token_threshold watermark prefix_cache_retention_interval
            offload_group_size shutdown_timeout""": (0,),
            """num_scheduler_steps pipeline_parallel_size data_parallel_size nnodes
            prefill_context_parallel_size decode_context_parallel_size
            dcp_kv_cache_interleave_size prefill_schedule_interval stream_interval
            offload_num_in_group offload_prefetch_step renderer_num_workers""": (1,),
            "tokenizer_mode config_format": ("auto", "hf"),
            "model_impl": ("auto", "vllm"),
            "task runner": ("auto", "generate", "embed", "pooling", "score"),
            "convert": ("auto", "none", "embed"),
            "ignore_patterns": (["original/**/*"], "original/**/*"),
            "kv_offloading_backend": ("native",),
            """lora_dtype worker_cls moe_backend linear_backend sparse_indexer_topk_backend
            kda_prefill_backend kda_decode_backend mamba_cache_dtype mamba_ssm_cache_dtype
            offload_backend torch_dtype device_map""": ("auto",),
            """limit_mm_per_prompt""": (
                {},
                {"image": 0},
                {"video": 0},
                {"audio": 0},
                {"image": 0, "video": 0},
            ),
            "guided_decoding_backend": ("auto", "guidance"),
            "structured_outputs_config": ("auto", "guidance", {}, {"backend": "auto"}),
            "compilation_config": ({}, 0, 1, 2, 3),
            "safetensors_load_strategy": ("lazy", "eager", "prefetch"),
            "pt_load_map_location": ("cpu",),
            "master_addr": ("127.0.0.1",),
            "master_port": (29501,),
            "data_parallel_backend": ("mp",),
            "all2all_backend": ("allgather_reducescatter",),
            "expert_placement_strategy": ("linear",),
            "mamba_backend": ("triton",),
            "optimization_level": (1, 2, 3),
            "performance_mode": ("balanced",),
            "sleep_mode_backend": ("cumem",),
            "per_request_spec_decode_metrics": ("none",),
        }
    ),
    "ServerOptions": other_names(
        {
            """tool_server fingerprint_value log_config_file max_log_len
            disable_access_log_for_endpoints allowed_origins ssl_keyfile ssl_certfile ssl_ca_certs
            ssl_ciphers h11_max_incomplete_event_size h11_max_header_count grpc_port
            data_parallel_supervisor_port dp_supervisor_probe_interval_s
            dp_supervisor_probe_timeout_s dp_supervisor_probe_failure_threshold middleware""": (),
            "reasoning_effort_map tool_parser_plugin": _EMPTY,
            """cohere_is_reasoning_model enable_flash_late_interaction
            disable_uvicorn_access_log""": (True, False),
            """enable_log_outputs enable_log_deltas enable_per_request_metrics
            enable_server_load_tracking enable_force_include_usage trust_request_mm_kwargs
            enable_scale_out enable_offline_docs trust_request_chat_template
            return_tokens_as_token_ids allow_credentials enable_ssl_refresh headless""": (False,),
            """enable_auto_tool_choice enable_prompt_tokens_details disable_fastapi_docs
            enable_tokenizer_info_endpoint enable_request_id_headers log_error_stack
            exclude_tools_when_tool_choice_none""": (True,),
            "sse_keep_alive_interval ssl_cert_reqs": (0,),
            "api_server_count": (1,),
            "tool_strict_level": ("auto",),
            "cohere_format": ("cmd3", "cmd4"),
            "anthropic_disabled_thinking_effort": ("auto", "none"),
            "fingerprint_mode": ("full", "hash"),
            "uvicorn_log_level": ("info",),
            "chat_template_content_format": ("auto", "string"),
            "response_role": ("assistant",),
            "allowed_methods allowed_headers": (["*"],),
        }
    ),
    "SpeculativeConfig": other_names(
        {
            "code_revision": (ANY,),
            """draft_tensor_parallel_size tensor_parallel_size quantization kv_cache_dtype
            max_model_len enforce_eager attention_backend revision disable_by_batch_size
            acceptance_method rejection_sample_method speculative_token_tree
            prompt_lookup_num_tokens num_assistant_tokens max_matching_ngram_size assistant_model
            speculative_model draft_model""": (),
        }
    ),
    "SamplingParams": other_names(
        {
            "output_text_buffer_length": (ANY,),
            """best_of guided_decoding response_format guided_json guided_regex guided_choice
            guided_grammar thinking_token_budget max_new_tokens max_completion_tokens n_predict
            stop_sequences stop_strings num_return_sequences top_logprobs repeat_penalty
            repetition_detection logprob_token_ids prompt_logprob_token_ids
            trace_decode_token_ids""": (),
            "skip_clone": (True, False),
            """stream use_beam_search early_stopping flat_logprobs skip_reading_prefix_cache
            watermarking""": (False,),
            "do_sample": (True,),
            "routed_experts_prompt_start": (0,),
            "length_penalty num_beams stream_interval": (1,),
        }
    ),
    "PoolingParams": other_names(
        {
            "use_activation softmax activation": (),
            "extra_kwargs": _EMPTY,
            "skip_reading_prefix_cache": (False,),
            "task": ("embed", "score", "classify"),
        }
    ),
    "StructuredOutputsParams": other_names(
        {
            """whitespace_pattern structural_tag json_schema schema pattern choices lark ebnf
            gbnf""": (),
            "disable_additional_properties": (True,),
        }
    ),
    "methods": other_names(
        {
            """usage_context start_engine_loop stat_loggers log_requests internal
            disable_log_requests disable_log_stats enable_multiprocessing
            reset_connector""": (ANY,),
            """prompt_adapter_request guided_options_request trace_headers prompt_text
            use_activation truncate_prompt_tokens prompt_token_ids""": (),
            "tokenization_kwargs mm_processor_kwargs": _EMPTY,
            "stream": (False,),
            "data_parallel_rank": (0,),
            "chat_template_content_format": ("auto", "string"),
        }
    ),
    "requests": other_names(
        {
            """mirostat_tau mirostat_eta dynatemp_exponent xtc_threshold dry_base dry_allowed_length
            dry_penalty_last_n dry_sequence_breakers""": (ANY,),
            """regex ebnf grammar json_schema stop_regex lora_path rid extra_key n_predict samplers
            custom_logit_processor custom_params session_params bootstrap_host bootstrap_port
            bootstrap_room data_parallel_rank routed_dp_rank disagg_prefill_dp_rank
            kv_transfer_params ec_transfer_params""": (),
            "lora mm_payload return_mm_kwargs media_io_kwargs mm_processor_kwargs": _EMPTY,
            """no_stop_trim return_tokens timings_per_token return_progress verbose
            return_hidden_states return_routed_experts return_cached_tokens_details
            return_weight_versions return_token_offsets return_prompt_text
            watermarking""": (False,),
            """separate_reasoning stream_reasoning parse_tool_calls cache_prompt add_special_tokens
            detokenize""": (True,),
            """n_probs mirostat dynatemp_range xtc_probability dry_multiplier n_keep n_discard
            routed_experts_prompt_start""": (0,),
            "typical_p tfs_z": (1,),
            "reasoning_format": ("auto", "deepseek"),
            "thinking_budget_tokens reasoning_budget_tokens repeat_last_n id_slot": (-1,),
            "truncation_side": ("left",),
        }
    ),
}
"""By class, names that are not fields of it; those of methods' keywords, and of requests."""
