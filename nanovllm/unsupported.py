"""Attributes of vLLM's and nano-vllm's classes that are not here, and what to use instead.

Knows no engine.
"""

from typing import NoReturn

NOT_IMPLEMENTED = {
    "beam_search": "SamplingParams(n=...) draws several continuations",
    "score": "SamplingParams(prompt_logprobs=0) gives the log-probabilities of a text",
    **dict.fromkeys(
        ("encode", "embed", "classify", "reward"),
        "nanovllm generates only: use a library for embeddings and classifiers",
    ),
    **dict.fromkeys(
        ("sleep", "wake_up", "is_sleeping"),
        "shutdown() frees the memory, and a new LLM loads the model again",
    ),
    **dict.fromkeys(
        ("collective_rpc", "apply_model", "update_weights"),
        "the workers run no code of the caller: save the weights and make a new LLM",
    ),
    **dict.fromkeys(
        ("add_lora", "remove_lora", "list_loras", "pin_lora"),
        "merge the adapter into the weights, such as with peft's merge_and_unload()",
    ),
    **dict.fromkeys(
        ("enqueue", "enqueue_chat", "wait_for_completion"),
        "call generate() in several threads, or use AsyncLLM, or add_request() and step()",
    ),
    **dict.fromkeys(("start_profile", "stop_profile"), "use torch.profiler around generate()"),
    "set_tokenizer": "to use another tokenizer, give token ids as prompts",
    "preprocess_chat": "render() returns the token ids of a conversation",
    "tokenizer": "get_tokenizer() returns it",
}
"""vLLM's and nano-vllm's attributes that `LLM` and `AsyncLLM` lack, and what to use instead."""


def refuse_attribute(owner: object, name: str) -> NoReturn:
    """Raise AttributeError, which says what to use instead of an attribute of vLLM's."""
    use = f": {NOT_IMPLEMENTED[name]}" if name in NOT_IMPLEMENTED else ""
    raise AttributeError(
        f"{type(owner).__name__!r} object has no attribute {name!r}{use}", name=name, obj=owner
    )
