"""Which words are meant as the name of a model, and what to write instead.

Other programs name models in other ways: ollama by a word and a tag, a browser by an address.
Nothing here reads files or asks the hub.
"""

import re

from nanovllm.errors import CheckpointError

_EXAMPLES = {
    "deepseek": "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B",
    "ernie": "baidu/ERNIE-4.5-0.3B-PT",
    "exaone": "LGAI-EXAONE/EXAONE-4.0-1.2B",
    "gemma": "google/gemma-3-1b-it",
    "gpt-oss": "openai/gpt-oss-20b",
    "granite": "ibm-granite/granite-4.0-1b",
    "hunyuan": "tencent/Hunyuan-0.5B-Instruct",
    "lfm": "LiquidAI/LFM2-1.2B",
    "llama": "meta-llama/Llama-3.2-1B-Instruct",
    "meta-llama": "meta-llama/Llama-3.2-1B-Instruct",
    "ministral": "mistralai/Ministral-3-3B-Instruct-2512",
    "mistral": "mistralai/Mistral-7B-Instruct-v0.3",
    "mixtral": "mistralai/Mixtral-8x7B-Instruct-v0.1",
    "olmo": "allenai/OLMo-2-0425-1B-Instruct",
    "phi": "microsoft/Phi-4-mini-instruct",
    "qwen": "Qwen/Qwen3-0.6B",
    "seed-oss": "ByteDance-Seed/Seed-OSS-36B-Instruct",
    "smollm": "HuggingFaceTB/SmolLM2-135M-Instruct",
    "tinyllama": "TinyLlama/TinyLlama-1.1B-Chat-v1.0",
}
"""A hub id of each family, by what its models' names begin with."""
_FAMILY = re.compile(rf"({'|'.join(sorted(_EXAMPLES, reverse=True))})(?![a-z])", re.IGNORECASE)
_SIZE = re.compile(r"[a-z][\w.-]*[-:]\d+(\.\d+)?[bm]([-.:_]\S*)?", re.IGNORECASE)
"""Names that end, or nearly so, in a number of parameters: nous-hermes-2-7b, command-r:35b."""
_HUB = re.compile(r"(?:https?://)?(?:www\.)?(?:hf\.co|huggingface\.co)/+", re.IGNORECASE)
_ADDRESS = re.compile(
    r"([\w.-]+/[\w.-]+)(?:/(?:tree|blob|resolve)/([\w.-]+))?((?:/[\w./-]+\.gguf|:[\w.-]+)?)/?"
    r"(?:\?download=true)?"
)
_TAGGED = re.compile(r"([\w.-]+/[\w.-]+):([\w.-]+)")


def looks_like_model(word: str) -> bool:
    """Return whether one word without a slash reads like the name of a model.

    Such are llama3.2, qwen3:0.6b and Mistral-7B; Mistral alone may be a word of a prompt.
    """
    if len(word) > 100 or "/" in word or len(word.split()) != 1:
        return False
    if family := _FAMILY.match(word):
        rest = word[family.end() :]
        return re.fullmatch(r"[-_.:\w]*", rest) is not None and (
            any(char.isdigit() or char == ":" for char in rest) or family[0].lower() == "gpt-oss"
        )
    return _SIZE.fullmatch(word) is not None


def is_path(word: str) -> bool:
    """Return whether a word can only be a path here, never a hub id: of Linux, macOS or Windows."""
    return word.startswith(("/", ".", "~")) or "\\" in word or word[1:3] == ":/"


def no_model(word: str, more: str = "") -> str:
    """Return what is wrong with a word that looks like a model, and the hub id that it may mean.

    Args:
        more: what the message says before its question.
    """
    family = _FAMILY.match(word)
    hint = f"; did you mean one such as {_EXAMPLES[family[0].lower()]!r}?" if family else ""
    return (
        f"{word!r} names no model: a model is a directory, a GGUF file, or a hub id, which is "
        f"OWNER/NAME{more}{hint}"
    )


def tag_of(model: str) -> tuple[str, str] | None:
    """Return the hub id and the tag of OWNER/NAME:TAG, which means a GGUF file of the repository.

    It is None for any other name. The caller looks for a file of that name here first.
    """
    found = _TAGGED.fullmatch(model)
    return (found[1], found[2]) if found else None


def hub_name(model: str) -> str:
    """Return the hub id, with a tag or a file, that an address of the hub means; other names as
    they are.

    `model` is not a path on this machine.

    Raises:
        CheckpointError: the name or the address means no model here, with what to write instead.
    """
    text = _HUB.sub("", model, count=1)
    if text == model:
        if looks_like_model(model):
            raise CheckpointError(no_model(model))
        return model
    found = _ADDRESS.fullmatch(text)
    if found is None:
        raise CheckpointError(f"model {model!r}: give the hub id alone, 'OWNER/NAME'")
    if found[2] not in (None, "main"):
        raise CheckpointError(
            f"model {model!r}: give the hub id alone, {found[1] + found[3]!r}, and "
            f"revision={found[2]!r}"
        )
    return found[1] + found[3]
