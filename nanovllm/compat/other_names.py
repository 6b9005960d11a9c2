"""Options of vLLM and nano-vllm that are not fields here, and what to use instead.

Tables only: `install` hands them to options/validation.py. docs/migrating.md shows them.
"""

from nanovllm.compat.further_options import FURTHER_NAMES
from nanovllm.options.validation import ANY, OTHER_NAMES, other_names

_TEXT_ONLY = "the models here read text only; leave it out"
_STRUCTURED = "use structured_outputs"
_ONE_COMPILER = "grammars are compiled by llguidance; leave it out"
_GENERATES = "the models here generate text; use sentence-transformers for embeddings and scores"
_ONE_COPY = "use tensor_parallel_size, or one LLM for each GPU"
_HOST_MEMORY = "use kv_offload_gib: GiB of host memory for KV that leaves the pool"
_WEIGHT_FILES = "weights are read from safetensors and GGUF files; leave it out"
_GRAPHS = "CUDA graphs are captured for all sizes; leave it out, or use enforce_eager=True for none"

_NO_MEDIA = ({}, *({kind: 0} for kind in ("image", "video", "audio")), {"image": 0, "video": 0})
_DRAFT_RANKS = "the draft network runs on the ranks of the model; leave it out"
_DRAFTS_PAY = "no drafts are proposed where they are not expected to pay; leave it out"

CONFIG_NAMES = other_names(
    ("trust_remote_code", (True, False), "no code of a checkpoint is run"),
    ("code_revision", (ANY,), "no code of a checkpoint is run"),
    ("tokenizer_mode", ("auto", "hf"), "only fast tokenizers are read; save a tokenizer.json"),
    ("tokenizer_revision", (), "use tokenizer with a local directory of that revision"),
    ("hf_token", (), "use the environment variable HF_TOKEN"),
    ("config_format", ("auto", "hf"), "only config.json is read; convert the checkpoint"),
    ("hf_config eos", (), "use hf_overrides to change fields of config.json"),
    ("rope_scaling", ({},), 'use hf_overrides={"rope_scaling": {...}}'),
    ("rope_theta", (), 'use hf_overrides={"rope_theta": ...}'),
    ("override_generation_config", ({},), "use SamplingParams"),
    ("model_impl", ("auto", "vllm"), "models run in nanovllm's own code only"),
    ("task runner", ("auto", "generate"), _GENERATES),
    ("convert", ("auto", "none"), _GENERATES),
    ("pooler_config", (), _GENERATES),
    ("served_model_name", (ANY,), "there is no server that shows a name"),
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
    ("kv_transfer_config", (), "use kv_offload_gib for host memory, kv_cache_dir for a directory"),
    ("prefix_caching_hash_algo", (ANY,), "a hit compares the tokens themselves"),
    ("disable_sliding_window", (False,), 'use hf_overrides={"use_sliding_window": False}'),
    ("use_v2_block_manager", (True,), "there is one block manager; leave it out"),
    ("enable_chunked_prefill", (True,), "use a max_num_batched_tokens of max_model_len or more"),
    ("num_scheduler_steps", (1,), "steps overlap on a GPU as it is; leave it out"),
    ("async_scheduling", (True, False), "steps overlap on a GPU as it is"),
    ("scheduling_policy", ("fcfs", "priority"), "requests go by priority, then by arrival"),
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
    ("logits_processors", ([],), "use SamplingParams.logits_processors"),
    ("compilation_config", ({}, 0, 1, 2, 3), _GRAPHS),
    ("max_seq_len_to_capture", (ANY,), "CUDA graphs are captured for all sizes"),
    ("enable_sleep_mode", (True, False), "every engine on a CPU can sleep"),
    ("disable_log_stats", (True, False), "no statistics are logged"),
    ("disable_log_requests enable_log_requests", (True, False), "the server logs a line for each"),
    ("attention_backend", ("auto",), "the device and the model choose it; leave it out"),
    ("worker_cls", ("auto",), "workers cannot be replaced; leave it out"),
    ("worker_extension_cls", ("",), "workers cannot be replaced; leave it out"),
    ("scheduler_cls", (), "the scheduler cannot be replaced; leave it out"),
    ("additional_config", ({},), "there are no plugins; leave it out"),
)
CONFIG_NAMES |= FURTHER_NAMES
"""Names of vLLM's EngineArgs and of nano-vllm's Config."""

_CONVERT = 'convert the checkpoint to safetensors and use "auto"'
_UNQUANTIZED = "load the unquantised checkpoint with"
_FROM_CHECKPOINT = "leave it out: the checkpoint says it"

CONFIG_VALUES = {
    "dtype": other_names(("half", (), 'use "float16"'), ("float", (), 'use "float32"')),
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
    ("code_revision", (ANY,), "no code of a checkpoint is run"),
    ("disable_by_batch_size", (), _DRAFTS_PAY),
    ("acceptance_method rejection_sample_method", (), _EXACT),
    ("speculative_token_tree", (), "drafts are a sequence and no tree; leave it out"),
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

_NO_BEAMS = "there is no beam search; use n continuations and their cumulative_logprob"

SAMPLING_NAMES = other_names(
    ("best_of", (), "use n, and take those of the best cumulative_logprob"),
    ("use_beam_search early_stopping", (False,), _NO_BEAMS),
    ("length_penalty", (1.0,), _NO_BEAMS),
    ("num_beams", (1,), _NO_BEAMS),
    ("guided_decoding response_format", (), _STRUCTURED),
    ("guided_json guided_regex guided_choice guided_grammar", (), _STRUCTURED),
    ("thinking_token_budget", (), "use max_tokens, stop or logits_processors"),
    ("extra_args", ({},), "use logits_processors"),
    ("max_new_tokens max_completion_tokens", (), "use max_tokens"),
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
    ("prompt_logprob_token_ids prompt_logprob_start", (), "use prompt_logprobs"),
    ("stream_interval", (1,), "a reader that is slow gets several tokens at once; leave it out"),
    ("routed_experts_prompt_start", (0,), "the experts of tokens are not returned; leave it out"),
    ("trace_decode_token_ids", (), "use prompt_logprobs of the text"),
)
"""Names of vLLM's SamplingParams, and of transformers and OpenAI for the same."""

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


def install() -> None:
    """Let the classes that have these names as keywords say what to use."""
    OTHER_NAMES.update(
        CONFIG_VALUES,
        method=SPECULATIVE_METHODS,
        Config=CONFIG_NAMES,
        SpeculativeConfig=SPECULATIVE_NAMES,
        SamplingParams=SAMPLING_NAMES,
        StructuredOutputsParams=STRUCTURED_NAMES,
    )
