"""The public names of vLLM 0.33: each works here, or says what to use."""

ENGINE_ARGS = """
    model enable_return_routed_experts return_sampling_mask model_weights served_model_name
    tokenizer hf_config_path runner convert skip_tokenizer_init enable_prompt_embeds
    tokenizer_mode trust_remote_code allowed_local_media_path allowed_media_domains download_dir
    safetensors_load_strategy safetensors_prefetch_num_threads safetensors_prefetch_block_size
    load_format config_format dtype kv_cache_dtype seed max_model_len cudagraph_capture_sizes
    max_cudagraph_capture_size ir_op_priority distributed_executor_backend
    pipeline_parallel_size master_addr master_port nnodes node_rank distributed_timeout_seconds
    cpu_distributed_timeout_seconds numa_bind numa_bind_nodes numa_bind_cpus device_ids
    tensor_parallel_size prefill_context_parallel_size decode_context_parallel_size
    dcp_comm_backend dcp_q_replicate dcp_kv_cache_interleave_size cp_kv_cache_interleave_size
    data_parallel_size data_parallel_rank data_parallel_start_rank data_parallel_size_local
    data_parallel_address data_parallel_rpc_port data_parallel_hybrid_lb
    data_parallel_external_lb data_parallel_multi_port_external_lb data_parallel_backend
    enable_hc_sp enable_expert_parallel enable_batch_sharded_sampling enable_ep_weight_filter
    moe_backend linear_backend sparse_indexer_topk_backend all2all_backend enable_elastic_ep
    elastic_ep_max_dp_size enable_dbo ubatch_size dbo_decode_token_threshold dp_sync_interval
    dbo_prefill_token_threshold disable_nccl_for_dp_synchronization eplb_config enable_eplb
    expert_placement_strategy max_parallel_loading_workers block_size enable_prefix_caching
    prefix_caching_hash_algo prefix_cache_retention_interval disable_sliding_window
    disable_cascade_attn offload_backend cpu_offload_gb cpu_offload_params offload_group_size
    offload_num_in_group offload_prefetch_step offload_params gpu_memory_utilization
    kv_cache_memory_bytes max_num_batched_tokens max_num_scheduled_tokens
    long_prefill_token_threshold long_prefill_token_threshold_adaptive max_num_seqs
    max_num_active_seqs max_num_queued_reqs max_num_queued_tokens max_logprobs logprobs_mode
    use_fp64_gumbel enable_trace_replay disable_log_stats aggregate_engine_logging revision
    code_revision hf_token hf_overrides model_class_overrides tokenizer_revision quantization
    quantization_config allow_deprecated_quantization enforce_eager disable_custom_all_reduce
    enable_shm_tensor_arena language_model_only limit_mm_per_prompt enable_mm_embeds
    interleave_mm_strings media_io_kwargs mm_processor_kwargs mm_processor_cache_gb
    mm_processor_cache_type mm_hasher_algorithm mm_shm_cache_max_object_size_mb mm_encoder_only
    mm_encoder_tp_mode mm_encoder_attn_backend mm_encoder_attn_dtype mm_encoder_fp8_scale_path
    mm_encoder_fp8_scale_save_path mm_encoder_fp8_scale_save_margin io_processor_plugin
    renderer_num_workers skip_mm_profiling video_pruning_rate video_pruning_method mm_tensor_ipc
    mm_processor_device mm_ipc_gpu_memory_gb mm_device_do_normalize enable_lora max_loras
    max_lora_rank default_mm_loras fully_sharded_loras max_cpu_loras lora_dtype
    lora_target_modules enable_tower_connector_lora specialize_active_lora
    enable_mixed_moe_lora_format enable_moe_shared_loras max_lora_cls_labels
    ray_workers_use_nsight num_gpu_blocks_override model_loader_extra_config ignore_patterns
    enable_chunked_prefill disable_chunked_mm_input scheduler_reserve_full_isl
    prefill_schedule_interval watermark disable_hybrid_kv_cache_manager
    structured_outputs_config aux_output_config reasoning_parser reasoning_parser_plugin
    speculative_config spec_method spec_model spec_tokens watermark_config diffusion_config
    show_hidden_metrics_for_version otlp_traces_endpoint collect_detailed_traces
    per_request_spec_decode_metrics kv_cache_metrics kv_cache_metrics_sample
    custom_histogram_buckets cudagraph_metrics enable_layerwise_nvtx_tracing enable_mfu_metrics
    enable_logging_iteration_details jit_monitor_mode jit_monitor_verbose
    enable_mm_processor_stats scheduling_policy scheduler_cls pooler_config compilation_config
    attention_config engram_config mamba_config kernel_config enable_flashinfer_autotune
    monokernel worker_cls worker_extension_cls profiler_config logging_config log_level
    log_config_file kv_transfer_config kv_events_config ec_transfer_config ec_manager_config
    reasoning_config generation_config enable_sleep_mode sleep_mode_backend
    sleep_mode_offload_cudagraph sleep_preserve_parameter_names enable_cumem_allocator
    enable_nccl_comm_suspend override_generation_config model_impl attention_backend
    kv_cache_dtype_skip_layers mamba_cache_dtype mamba_ssm_cache_dtype mamba_block_size
    prefix_match_unit mamba_cache_mode enable_mamba_shared_prefix_checkpoint
    replayssm_buffer_len use_replayssm mamba_backend mamba_ssu_algorithm
    enable_mamba_cache_stochastic_rounding mamba_cache_philox_rounds additional_config
    use_tqdm_on_load pt_load_map_location logits_processors async_scheduling stream_interval
    kv_sharing_fast_prefill swa_bounded_replay optimization_level performance_mode
    fault_tolerance_config enable_fault_tolerance kv_offloading_size kv_offloading_backend
    tokens_only shutdown_timeout watchdog_config weight_transfer_config
    fail_on_environ_validation gdn_prefill_backend kda_prefill_backend kda_decode_backend
    enable_log_requests
"""
LLM_METHODS = """
    from_engine_args get_tokenizer get_world_size reset_mm_cache get_default_sampling_params
    generate enqueue wait_for_completion collective_rpc apply_model chat enqueue_chat
    start_profile stop_profile reset_prefix_cache sleep release_kv_cache_memory wake_up
    get_metrics beam_search supported_tasks encode embed classify score
    init_weight_transfer_engine shutdown_weight_transfer_engine start_weight_update
    start_draft_weight_update update_weights finish_weight_update update_weight_version
    get_weight_version
"""
ASYNC_LLM_METHODS = """
    from_engine_args shutdown get_num_unfinished_requests get_num_queued_tokens
    check_admission get_supported_tasks add_request generate abort
    notify_kv_transfer_request_rejected pause_generation resume_generation is_paused encode
    tokenizer get_tokenizer is_tracing_enabled do_log_stats check_health start_profile
    stop_profile reset_mm_cache reset_prefix_cache reset_encoder_cache sleep
    release_kv_cache_memory wake_up checkpoint_prepare checkpoint_restore is_sleeping
    compute_weight_checksums add_lora remove_lora list_loras pin_lora collective_rpc
    wait_for_requests_to_drain scale_elastic_ep get_external_elastic_ep_status handle_fault
    get_status is_running is_stopped errored should_keep_api_server_alive dead_error
    init_weight_transfer_engine shutdown_weight_transfer_engine start_weight_update
    start_draft_weight_update update_weights finish_weight_update update_weight_version
    get_weight_version get_kv_event_sources
"""
LLM_ENGINE_METHODS = """
    from_engine_args get_num_unfinished_requests has_unfinished_requests
    has_unfinished_requests_dp get_supported_tasks abort_request add_request step start_profile
    stop_profile reset_mm_cache reset_prefix_cache reset_encoder_cache sleep
    release_kv_cache_memory wake_up is_sleeping get_metrics tokenizer get_tokenizer do_log_stats
    do_log_stats_with_interval add_lora remove_lora list_loras pin_lora collective_rpc
    set_weight_version get_weight_version apply_model
"""
SAMPLING_PARAMS = """
    n presence_penalty frequency_penalty repetition_penalty temperature watermarking top_p top_k
    min_p seed stop stop_token_ids ignore_eos max_tokens min_tokens logprobs prompt_logprobs
    prompt_logprob_token_ids prompt_logprob_start logprob_token_ids flat_logprobs detokenize
    skip_special_tokens spaces_between_special_tokens include_stop_str_in_output output_kind
    stream_interval skip_clone output_text_buffer_length structured_outputs logit_bias
    allowed_token_ids extra_args bad_words skip_reading_prefix_cache thinking_token_budget
    repetition_detection routed_experts_prompt_start trace_decode_token_ids
"""
STRUCTURED_OUTPUTS = """
    json regex choice grammar json_object disable_any_whitespace disable_additional_properties
    whitespace_pattern structural_tag
"""
SERVER_ARGS = """
    lora_modules chat_template chat_template_content_format trust_request_chat_template
    trust_request_mm_kwargs default_chat_template_kwargs reasoning_effort_map response_role
    return_tokens_as_token_ids enable_auto_tool_choice exclude_tools_when_tool_choice_none
    tool_call_parser tool_parser_plugin tool_strict_level tool_server max_log_len
    enable_prompt_tokens_details enable_per_request_metrics enable_server_load_tracking
    enable_force_include_usage sse_keep_alive_interval enable_tokenizer_info_endpoint
    enable_log_outputs enable_log_deltas cohere_is_reasoning_model cohere_format
    anthropic_disabled_thinking_effort log_error_stack enable_scale_out fingerprint_mode
    fingerprint_value host port grpc_port data_parallel_supervisor_port
    dp_supervisor_probe_interval_s dp_supervisor_probe_timeout_s
    dp_supervisor_probe_failure_threshold uds uvicorn_log_level disable_uvicorn_access_log
    disable_access_log_for_endpoints allow_credentials allowed_origins allowed_methods
    allowed_headers ssl_keyfile ssl_certfile ssl_ca_certs enable_ssl_refresh ssl_cert_reqs
    ssl_ciphers root_path middleware enable_request_id_headers disable_fastapi_docs
    h11_max_incomplete_event_size h11_max_header_count enable_offline_docs
    enable_flash_late_interaction
"""
ROUTES = """
    /health /load /ping /version /server_info /tokenizer_info /tokenize /detokenize /v1/models
    /v1/chat/completions /v1/chat/completions/batch /v1/chat/completions/render
    /v1/chat/completions/derender /v1/completions /v1/completions/render
    /v1/completions/derender /v1/responses /v1/responses/render /v1/messages
    /v1/messages/count_tokens /v1/messages/render /v1/embeddings /v2/embed /pooling /classify
    /score /v1/score /generative_scoring /rerank /v1/rerank /v2/rerank /v1/audio/transcriptions
    /v1/audio/translations /v1/realtime /v1/decisions /v1/systemone /cohere/v2/chat /invocations
    /inference/v1/generate /inference/v1/abort_requests /abort_requests /v1/load_lora_adapter
    /v1/unload_lora_adapter /sleep /wake_up /is_sleeping /pause /resume /is_paused
    /release_kv_cache_memory /reset_prefix_cache /reset_mm_cache /reset_encoder_cache
    /start_profile /stop_profile /collective_rpc /init_weight_transfer_engine
    /shutdown_weight_transfer_engine /start_weight_update /start_draft_weight_update
    /update_weights /finish_weight_update /update_weight_version /weight_checker /weight_info
    /get_world_size /scale_elastic_ep /is_scaling_elastic_ep /fault_tolerance/status
    /fault_tolerance/apply /kv_event_sources /metrics
"""
