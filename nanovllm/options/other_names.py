"""Names of other engines that are not here: which values change nothing, and what to use instead.

A table only. Each place where a name comes in asks it for a name that it does not know, and else
says that the name is unknown, and which one was meant.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

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
_NOT_STORED = "responses are not stored: send the earlier items as input"
_STATUS = "use GET /v1/models or /metrics"
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
        "--narrate": "use `nanovllm explain`, or trace_file",
        "--config": "put the command with its flags into a shell script",
        "hf_token token use_auth_token": "use the environment variable HF_TOKEN",
        "nnodes node_rank master_addr": 'use distributed_executor_backend="ray"',
        "tokenizer_revision": "use tokenizer with a local directory of that revision",
        "rope_scaling rope_theta hf_config": "use hf_overrides to change fields of config.json",
        "task runner": "embed() and score() make vectors and scores of any model; leave it out",
        "speculative_model num_speculative_tokens": 'use speculative_config={"model": ...}',
        "compilation_config optimization_level cudagraph_capture_sizes": _GRAPHS,
        "enable_chunked_prefill": "use a max_num_batched_tokens of max_model_len or more",
        "torch_dtype": "use dtype",
        "load_in_8bit load_in_4bit": 'use quantization="int8" or quantization="int4"',
        "cache_dir": "use download_dir",
        "n_ctx ctx_size context_length": "use max_model_len",
        "n_gpu_layers device_map": _DEVICE,
        "mem_fraction_static": "use gpu_memory_utilization",
        "tp_size": "use tensor_parallel_size",
        "merge_lora": "use enable_lora=True and lora_request, or PEFT's merge_and_unload",
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
        "mm_processor_kwargs": "give it to the engine, or in a prompt's dictionary",
        "tokenization_kwargs": "use truncate_prompt_tokens, or give token ids as prompts",
        "truncate_prompt_tokens": "it is a field of SamplingParams and PoolingParams",
        "use_activation": "use PoolingParams(normalize=...); scores have the model's activation",
        "functions function_call": "use tools and tool_choice",
        "chat_template": "templates are not taken from requests; use chat_template_kwargs",
        "conversation previous_response_id": _NOT_STORED,
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
    """Values that ask for what happens anyway; they change nothing. None is always one, and ...
    stands for all values."""
    remedy: str | None
    """What to do instead of giving another value; None: the name is as one that is unknown."""

    def accepts(self, value: Any) -> bool:
        """Whether `value` asks for what happens anyway."""
        if value is None or ... in self.accepted:
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


def find_other(others: Mapping[str, OtherName], name: str) -> OtherName | None:
    """Return what is known of a name: that of `others`, or its remedy, if it has one."""
    if name not in others and name in REMEDIES:
        return OtherName((), REMEDIES[name])
    return others.get(name)


OTHER_NAMES: Mapping[str, dict[str, OtherName]] = {
    "Config": other_names(
        {
            """trust_remote_code async_scheduling disable_custom_all_reduce enable_sleep_mode
            disable_log_stats disable_log_requests enable_log_requests
            low_cpu_mem_usage""": (True, False),
            """calculate_kv_scales disable_sliding_window enable_expert_parallel
            enable_prompt_embeds load_in_8bit load_in_4bit""": (False,),
            "enable_chunked_prefill use_v2_block_manager": (True,),
            "swap_space cpu_offload_gb node_rank": (0,),
            "pipeline_parallel_size data_parallel_size nnodes num_scheduler_steps": (1,),
            """max_cpu_loras code_revision served_model_name mm_processor_cache_gb
            mm_encoder_tp_mode skip_mm_profiling""": (...,),
            "tokenizer_mode model_impl": ("auto", "hf", "vllm"),
            "task runner convert": ("auto", "none", "generate", "embed", "pooling", "score"),
            "torch_dtype device_map guided_decoding_backend moe_backend": ("auto",),
            "rope_scaling": _EMPTY,
            "compilation_config optimization_level": ({}, 1, 2, 3),
        }
    ),
    "ServerOptions": other_names(
        {
            "enable_auto_tool_choice enable_prompt_tokens_details": (True,),
            "disable_uvicorn_access_log": (True, False),
            "enable_log_outputs enable_force_include_usage allow_credentials": (False,),
            "api_server_count": (1,),
            "uvicorn_log_level": ("info",),
            "chat_template_content_format": ("auto", "string"),
            "response_role": ("assistant",),
            "allowed_methods allowed_headers": (["*"],),
        }
    ),
    "SamplingParams": other_names(
        {
            "stream use_beam_search early_stopping flat_logprobs": (False,),
            "do_sample": (True,),
            "length_penalty num_beams": (1,),
        }
    ),
    "PoolingParams": other_names({"task": ("embed", "score", "classify")}),
    "methods": other_names(
        {
            "trace_headers prompt_token_ids": (),
            "tokenization_kwargs mm_processor_kwargs": _EMPTY,
            "stream": (False,),
            "chat_template_content_format": ("auto", "string"),
        }
    ),
    "requests": other_names(
        {
            """mirostat_tau mirostat_eta dynatemp_exponent xtc_threshold dry_base dry_allowed_length
            dry_penalty_last_n dry_sequence_breakers""": (...,),
            "mm_processor_kwargs": _EMPTY,
            "no_stop_trim return_tokens timings_per_token return_hidden_states": (False,),
            """separate_reasoning stream_reasoning parse_tool_calls cache_prompt add_special_tokens
            detokenize""": (True,),
            "n_probs mirostat dynatemp_range xtc_probability dry_multiplier n_keep": (0,),
            "typical_p tfs_z": (1,),
            "reasoning_format": ("auto", "deepseek"),
            "thinking_budget_tokens repeat_last_n id_slot": (-1,),
        }
    ),
}
"""By class, names that are not fields of it, and the values that they may have; those of methods'
keywords, and of requests."""
