"""The options of vLLM's EngineArgs that few scripts set, and what to use instead.

A table only, as other_names.py: each name has vLLM's default among what is accepted.
"""

from nanovllm.options.validation import ANY, other_names

_NO_MEDIA = "the models here read text only"
_TEXT_ONLY = "the models here read text only; leave it out"
_KERNELS = "the device and the model choose the kernels; leave it out"
_STATES = "the model says how its states are kept; leave it out"
_EXPERTS = "each rank has a part of every expert; leave it out"
_ONE_COPY = "use tensor_parallel_size, or one LLM for each GPU"
_BY_RAY = 'use distributed_executor_backend="ray" for several machines'
_NUMA = "use num_threads, and numactl around the program"
_ONE_BATCH = "a step is one batch; leave it out"
_SCHEDULED = "use max_num_batched_tokens and max_num_seqs; a prompt takes what is left of a step"
_OF_SERVER = "it is an option of the server: max_waiting"
_ON_DEVICE = "weights stay on one device; use quantization to make them smaller"
_READ_FAST = "files are read as suits the machine"
_GRAPHS = "CUDA graphs are captured for all sizes; leave it out, or use enforce_eager=True for none"
_COUNTED = "use get_metrics(), or /metrics of the server"
_TRACED = "use trace for the engine's steps, or torch.profiler around generate()"
_LOGGED = "use the module logging, or the options of the server"
_NOT_RETURNED = "nothing like it is returned; leave it out"
_ADAPTERS = "an adapter's files say what it changes; leave it out"
_NO_PLUGINS = "there are no plugins; leave it out"
_SLEEP = "use sleep(level) and wake_up(tags)"
_RANK_DIES = "a rank that dies ends the engine with an error; leave it out"
_ALL_LAYERS = "it is the same for all layers that keep KV; leave it out"

FURTHER_NAMES = other_names(
    ("model_weights", ("",), "use model"),
    ("hf_config_path", (), "use hf_overrides to change fields of config.json"),
    ("model_class_overrides", ({},), "models are files of nanovllm/models; leave it out"),
    ("quantization_config", (), "leave it out: the checkpoint says it"),
    ("allow_deprecated_quantization", (True, False), "leave it out: the checkpoint says it"),
    ("safetensors_load_strategy", ("lazy", "eager", "prefetch"), f"{_READ_FAST}; leave it out"),
    ("safetensors_prefetch_num_threads safetensors_prefetch_block_size", (ANY,), _READ_FAST),
    ("max_parallel_loading_workers", (ANY,), _READ_FAST),
    ("pt_load_map_location", ("cpu",), "no file of pickles is read; leave it out"),
    ("tokens_only", (False,), "use skip_tokenizer_init=True"),
    ("enable_return_routed_experts return_sampling_mask", (False,), _NOT_RETURNED),
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
    ("stream_interval", (1,), "a reader that is slow gets several tokens at once; leave it out"),
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
    ("language_model_only skip_mm_profiling disable_chunked_mm_input", (True, False), _NO_MEDIA),
    ("interleave_mm_strings enable_mm_processor_stats", (True, False), _NO_MEDIA),
    ("mm_device_do_normalize", (True, False), _NO_MEDIA),
    (
        "media_io_kwargs allowed_media_domains video_pruning_rate video_pruning_method",
        (ANY,),
        _NO_MEDIA,
    ),
    (
        "mm_processor_cache_gb mm_processor_cache_type mm_shm_cache_max_object_size_mb",
        (ANY,),
        _NO_MEDIA,
    ),
    (
        "mm_hasher_algorithm mm_tensor_ipc mm_processor_device mm_ipc_gpu_memory_gb",
        (ANY,),
        _NO_MEDIA,
    ),
    ("mm_encoder_tp_mode mm_encoder_attn_backend mm_encoder_attn_dtype", (ANY,), _NO_MEDIA),
    ("mm_encoder_fp8_scale_path mm_encoder_fp8_scale_save_path", (ANY,), _NO_MEDIA),
    ("mm_encoder_fp8_scale_save_margin ec_manager_config", (ANY,), _NO_MEDIA),
    ("enable_mm_embeds mm_encoder_only enable_tower_connector_lora", (False,), _TEXT_ONLY),
    ("default_mm_loras ec_transfer_config", (), _TEXT_ONLY),
)
"""By name of vLLM's EngineArgs."""
