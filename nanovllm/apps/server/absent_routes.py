"""Routes of other servers that are not here, and what to use instead; docs/migrating.md shows them.

A table only.
"""

_NO_SOUND = "the models here read and write text only"
_BATCH = "use `nanovllm batch`, which takes OpenAI's files of requests"
_LOAD = "use GET /v1/models, /metrics or /status.json"
_DEV_MODE = "start the server with --dev-mode"
_TEXT_ONLY_CACHE = "the models here read text only, so there is no such cache"
_RENDER = "use POST /tokenize with messages, which returns the tokens of a conversation"
_OPENAI = "use POST /v1/chat/completions"
_NO_ELASTIC = "the number of ranks is fixed: start another server"
_EMBEDDINGS = "use POST /v1/embeddings"
_NO_CLASSIFIERS = "there are no classifiers; POST /v1/score has the scores of rerankers"
_CLOSE = "close the request's connection"
_MODELS = "use GET /v1/models"
_WEIGHTS = "start the server with --dev-mode, and use POST /update_weights"
_BY_NAME = "a server of several models loads one when a request names it"
_SPLIT = "POST /v1/chat/completions answers with reasoning and tool calls split off"
_NO_SESSIONS = "send the whole conversation: the prefix cache finds its beginning"

ABSENT_ROUTES = {
    "/v1/chat/completions/batch": "send each conversation alone, at the same time, or use "
    "`nanovllm batch`; the engine computes them together",
    **dict.fromkeys(
        (
            *("/v1/chat/completions/render", "/v1/completions/render", "/v1/responses/render"),
            *("/v1/messages/render", "/v1/chat/completions/input_tokens"),
        ),
        _RENDER,
    ),
    **dict.fromkeys(
        ("/v1/chat/completions/derender", "/v1/completions/derender"), "use POST /detokenize"
    ),
    "/v1/responses/compact": "ask POST /v1/responses for a summary of the conversation",
    **dict.fromkeys(("/cohere/v2/chat", "/v2/chat", "/v1/chat", "/invocations"), _OPENAI),
    **dict.fromkeys(("/api/chat", "/api/generate", "/vertex_generate"), _OPENAI),
    "/v1": "routes begin with it: it belongs to the address that a client is given",
    **dict.fromkeys(("/v1/decisions", "/v1/systemone"), _OPENAI),
    **dict.fromkeys(("/abort_request", "/abort_requests", "/inference/v1/abort_requests"), _CLOSE),
    "/v2/embed": "use POST /v1/embeddings, with prompt_name for the input type",
    **dict.fromkeys(("/classify", "/v1/classify"), _NO_CLASSIFIERS),
    "/generative_scoring": "use POST /v1/score, or POST /v1/completions with logprobs",
    **dict.fromkeys(
        (
            *("/v1/audio/transcriptions", "/v1/audio/translations", "/v1/audio/speech"),
            *("/v1/realtime", "/v1/images/generations", "/v1/images/edits"),
        ),
        _NO_SOUND,
    ),
    **dict.fromkeys(("/v1/files", "/v1/batches", "/v1/messages/batches"), _BATCH),
    "/v1/moderations": "there are no classifiers",
    "/v1/conversations": "use previous_response_id of POST /v1/responses",
    **dict.fromkeys(
        (
            *("/completion", "/infill", "/v1/infill", "/v1/fim/completions"),
            *("/generate", "/generate_stream"),
        ),
        "use POST /v1/completions",
    ),
    **dict.fromkeys(
        ("/v1/embed", "/embed", "/embedding", "/encode", "/api/embed", "/api/embeddings"),
        _EMBEDDINGS,
    ),
    "/apply-template": _RENDER,
    **dict.fromkeys(("/api/tags", "/api/ps", "/api/show"), _MODELS),
    **dict.fromkeys(("/api/pull", "/api/delete"), "use `hf download` and `hf cache rm`"),
    **dict.fromkeys(("/models/load", "/models/unload"), _BY_NAME),
    **dict.fromkeys(("/parse_function_call", "/separate_reasoning"), _SPLIT),
    **dict.fromkeys(("/open_session", "/close_session"), _NO_SESSIONS),
    **dict.fromkeys(
        (
            *("/props", "/slots", "/get_server_info", "/get_model_info", "/model_info", "/info"),
            *("/get_load", "/v1/loads"),
        ),
        _LOAD,
    ),
    "/lora-adapters": "use GET /v1/models, and name an adapter as the model",
    "/flush_cache": "use POST /reset_prefix_cache, with --dev-mode; or give requests a cache_salt",
    **dict.fromkeys(("/ping", "/health_generate", "/fault_tolerance/status"), "use GET /health"),
    "/fault_tolerance/apply": "a dead engine ends the process: let what started it start it again",
    "/load": _LOAD,
    **dict.fromkeys(("/scale_elastic_ep", "/is_scaling_elastic_ep"), _NO_ELASTIC),
    **dict.fromkeys(
        (
            *("/pause", "/resume", "/is_paused", "/reset_prefix_cache", "/server_info"),
            *("/init_weight_transfer_engine", "/shutdown_weight_transfer_engine"),
            *("/start_weight_update", "/update_weights", "/finish_weight_update", "/weight_info"),
            *("/get_world_size", "/update_weights_from_disk"),
        ),
        _DEV_MODE,
    ),
    **dict.fromkeys(
        ("/sleep", "/wake_up", "/is_sleeping"), "start the server with --enable-sleep-mode"
    ),
    **dict.fromkeys(("/release_kv_cache_memory", "/release_memory_occupation"), "use POST /sleep"),
    "/resume_memory_occupation": "use POST /wake_up",
    **dict.fromkeys(
        (
            *("/update_weights_from_distributed", "/update_weights_from_tensor"),
            *("/update_weights_from_ipc", "/init_weights_update_group"),
            "/destroy_weights_update_group",
            *("/init_communicator", "/update_named_param", "/close_communicator"),
        ),
        _WEIGHTS,
    ),
    "/pause_generation": "start the server with --dev-mode, and use POST /pause: retract is "
    "mode=keep, and in_place is mode=keep&clear_cache=false",
    "/continue_generation": "start the server with --dev-mode, and use POST /resume",
    "/start_draft_weight_update": "a draft model keeps its weights: its drafts change no token",
    "/update_weight_version": "POST /finish_weight_update takes weight_version",
    **dict.fromkeys(
        ("/weight_checker", "/weights_checker", "/get_weights_by_name"),
        "compare the prompt_logprobs of a text",
    ),
    **dict.fromkeys(("/get_weight_version", "/weight_version"), "use GET /weight_info"),
    **dict.fromkeys(("/reset_mm_cache", "/reset_encoder_cache"), _TEXT_ONLY_CACHE),
    **dict.fromkeys(("/start_profile", "/stop_profile"), "start the server with --profile-dir"),
    "/collective_rpc": "the workers run no code of the caller",
    "/kv_event_sources": "KV has no events",
}
"""By path: what to use."""
