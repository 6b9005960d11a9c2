"""Methods and imports of vLLM and nano-vllm that are not here, and what to use instead.

Tables for error messages: options/other_names.py has those of options. docs/migrating.md shows
both.
"""

METHODS = {
    "beam_search": "SamplingParams(n=...) draws several continuations",
    "encode": "use embed(), whose outputs have outputs.embedding",
    **dict.fromkeys(
        ("classify", "reward"), "there are no classifiers; score() has the scores of rerankers"
    ),
    **dict.fromkeys(
        ("collective_rpc", "apply_model"),
        "the workers run no code of the caller: update_weights() gives them weights",
    ),
    **dict.fromkeys(
        ("add_lora", "remove_lora", "list_loras", "pin_lora"),
        "give each request lora_request=LoRARequest(name, id, path)",
    ),
    **dict.fromkeys(
        ("enqueue", "enqueue_chat", "wait_for_completion"),
        "call generate() in several threads, or use AsyncLLM, or add_request() and step()",
    ),
    **dict.fromkeys(
        ("llm_engine", "from_engine_args"), "LLM and AsyncLLM of nanovllm.vllm have it"
    ),
    "set_tokenizer": "to use another tokenizer, give token ids as prompts",
    "preprocess_chat": "render() returns the token ids of a conversation",
    "tokenizer": "get_tokenizer() returns it",
    **dict.fromkeys(
        ("model_config", "vllm_config", "get_model_config", "get_vllm_config"),
        "llm.engine.config has the options, and llm.engine.worker_info what was found, such as "
        "max_model_len",
    ),
    "get_world_size": "it is the option tensor_parallel_size",
    **dict.fromkeys(
        ("supported_tasks", "get_supported_tasks"),
        "each model has embed and score, and generate unless it is an encoder",
    ),
    **dict.fromkeys(
        ("reset_mm_cache", "reset_encoder_cache"),
        "the models here read text only, so there is no such cache",
    ),
    "wait_for_requests_to_drain": "update_weights() and sleep() with mode='wait' await requests",
    "release_kv_cache_memory": "sleep() gives it back, and wake_up() takes it again",
    **dict.fromkeys(
        ("checkpoint_prepare", "checkpoint_restore"),
        "sleep() gives memory back, and wake_up() takes it again",
    ),
    **dict.fromkeys(
        ("init_weight_transfer_engine", "shutdown_weight_transfer_engine"),
        "update_weights(pairs) takes tensors of any source: receive them, and give them",
    ),
    "start_draft_weight_update": "a draft model keeps its weights: its drafts change no token",
    **dict.fromkeys(
        ("update_weight_version", "set_weight_version"),
        "update_weights(pairs, weight_version=...) sets it",
    ),
    "get_weight_version": "each RequestOutput has its weight_version, and so has LLM",
    "compute_weight_checksums": "compare the prompt_logprobs of a text",
    **dict.fromkeys(
        ("get_num_unfinished_requests", "get_num_queued_tokens"),
        "get_metrics() counts the requests that run and wait",
    ),
    **dict.fromkeys(("do_log_stats", "do_log_stats_with_interval"), "get_metrics() counts"),
    "check_admission": "an engine takes all requests; the server has --max-waiting",
    "has_unfinished_requests_dp": "use has_unfinished_requests()",
    "is_tracing_enabled": "it is on if the option trace is given",
    **dict.fromkeys(
        ("notify_kv_transfer_request_rejected", "get_kv_event_sources"),
        "KV has no transfers and no events",
    ),
    **dict.fromkeys(
        ("scale_elastic_ep", "get_external_elastic_ep_status"),
        "the number of ranks is fixed: make another engine",
    ),
    **dict.fromkeys(
        (
            *("handle_fault", "get_status", "is_running", "is_stopped", "errored", "dead_error"),
            "should_keep_api_server_alive",
        ),
        "check_health() raises EngineDeadError if the engine is down",
    ),
}
"""vLLM's and nano-vllm's attributes that `LLM` and `AsyncLLM` lack, and what to use instead."""


LACKS = {
    "LLM": dict.fromkeys(
        ("pause_generation", "resume_generation", "is_paused"),
        "AsyncLLM has it; update_weights() and sleep() first end the requests in flight, or with "
        "mode='wait' await them",
    ),
    "AsyncLLM": {
        "add_request": "stream(prompt, params) queues a request, and yields its outputs",
    },
    "LLMEngine": {
        **dict.fromkeys(
            ("sleep", "wake_up", "is_sleeping"), "LLM and AsyncLLM have it: use llm.sleep()"
        ),
        **dict.fromkeys(("start_profile", "stop_profile"), "LLM and AsyncLLM have it"),
    },
}
"""The same for one class alone: another one has the attribute."""

_TEXT_ONLY = "the models here read text only"
_VECTORS = "embed() returns EmbeddingRequestOutput, and score() ScoringRequestOutput"
_CLASSES = "there are no classifiers; score() has the scores of rerankers"
_OPTIONS = "LLM and AsyncLLM take all options by name, and dictionaries for groups of them"
_BEAMS = "there is no beam search; use SamplingParams(n=...)"
_MODELS = 'give LLM a class of yours as model_family="module:Class"'

IMPORTS = {
    **dict.fromkeys(("multimodal", "assets", "MultiModalDataDict"), _TEXT_ONLY),
    "pooling_params": "use `from nanovllm import PoolingParams`",
    **dict.fromkeys(("PoolingOutput", "PoolingRequestOutput"), _VECTORS),
    "ClassificationRequestOutput": _CLASSES,
    **dict.fromkeys(("BeamSearchParams", "beam_search"), _BEAMS),
    **dict.fromkeys(("ModelRegistry", "model_executor"), _MODELS),
    **dict.fromkeys(("VllmConfig", "ModelConfig", "CompilationConfig"), _OPTIONS),
    **dict.fromkeys(("KVTransferConfig", "ProfilerConfig", "AttentionConfig"), _OPTIONS),
    "GuidedDecodingParams": "use SamplingParams(structured_outputs=StructuredOutputsParams(...))",
    "sample": "use SamplingParams(logits_processors=[function]), a list for each request",
    "initialize_ray_cluster": 'use distributed_executor_backend="ray"',
    "tokenizers": "get_tokenizer() of LLM returns the tokenizer",
    "transformers_utils": "get_tokenizer() of LLM returns the tokenizer",
    "benchmarks": "use a load generator that speaks OpenAI's API, such as guidellm",
    "platforms": "use torch.cuda.is_available()",
    "logger": "use logging.getLogger(__name__)",
    "envs": "there are no VLLM_ variables; use the options of LLM",
    "plugins": 'give LLM classes of yours as "module:Class"; docs/plugins.md shows which',
}
"""By name, or last part of a module's name: what to use instead of vLLM's."""

VLLM_NAMES = (
    *("EngineArgs", "AsyncEngineArgs", "FlexibleArgumentParser", "LLMEngine", "AsyncLLMEngine"),
    *("TextPrompt", "TokensPrompt", "PromptType", "cleanup_dist_env_and_memory"),
)
"""What `nanovllm.vllm` has and `nanovllm` has not."""


def missing_attribute(kind: str, name: str) -> str:
    """Return the message for an attribute that a class of this name does not have."""
    advice = {**METHODS, **LACKS.get(kind, {})}
    use = f": {advice[name]}" if name in advice else ""
    return f"{kind!r} object has no attribute {name!r}{use}"


def missing_name(module: str, name: str) -> Exception:
    """Return the error for a name that a module does not have.

    It is an ImportError where something else is to be imported or used: `from module import name`
    shows the message of an ImportError, not that of an AttributeError.
    """
    message = f"module {module!r} has no attribute {name!r}"
    if name in IMPORTS:
        return ImportError(f"{message}: {IMPORTS[name]}", name=module)
    if name in VLLM_NAMES:
        return ImportError(f"{message}: use `from nanovllm.vllm import {name}`", name=module)
    return AttributeError(message)
