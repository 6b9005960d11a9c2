"""Which words are meant as models, and what the message offers in their place."""

import pytest

from nanovllm import LLM
from nanovllm.errors import CheckpointError
from nanovllm.options.model_names import hub_name, is_path, looks_like_model


@pytest.mark.parametrize(
    "word",
    [
        *("llama3.2", "qwen3:0.6b", "Mistral-7B", "gpt-oss", "gpt-oss:20b", "phi4", "smollm2"),
        *("lfm2", "olmo2", "granite-4", "ministral-3b", "exaone4", "hunyuan-0.5b", "ernie-4.5"),
        *("gemma3:latest", "Meta-Llama-3-8B-Instruct", "command-r:35b", "nous-hermes-2-7b.Q4_K_M"),
    ],
)
def test_names_of_models(word: str) -> None:
    assert looks_like_model(word)


@pytest.mark.parametrize(
    "word",
    [
        *("", "Hi", "2+2", "Mistral", "llama", "Gemma3?", "phillips66", "what's", "C3PO", "7B"),
        *("llama3.2 is", "Qwen/Qwen3-0.6B", "llamas2", "x" * 5000, "résumé-2024", "utf-8", "mp3"),
    ],
)
def test_words_of_prompts(word: str) -> None:
    assert not looks_like_model(word)


def test_a_path_of_any_system_is_no_hub_id() -> None:
    paths = (r"C:\models\x", "C:/models/x", r"models\x", r"\\host\share\x", "/x", "./x", "~/x")
    assert all(map(is_path, paths))
    assert not any(map(is_path, ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B:Q4_K_M", "x", "models/x")))
    for path in paths[:4]:
        with pytest.raises(CheckpointError, match="directory .* does not exist"):
            LLM(path)
    with pytest.raises(CheckpointError, match="GGUF file .* does not exist"):
        LLM(r"C:\models\x.gguf")


@pytest.mark.parametrize(
    ("model", "meant"),
    [
        ("qwen3:0.6b", "did you mean one such as 'Qwen/Qwen3-0.6B'?"),
        ("Llama-3.2-1B", "did you mean one such as 'meta-llama/Llama-3.2-1B-Instruct'?"),
        ("command-r:35b", "a hub id, which is OWNER/NAME"),
        ("https://hf.co/", "give the hub id alone, 'OWNER/NAME'"),
        ("hf.co/a/b/c/d", "give the hub id alone, 'OWNER/NAME'"),
        ("hf.co/a/b/blob/v2/c.gguf", "give the hub id alone, 'a/b/c.gguf', and revision='v2'"),
    ],
)
def test_names_of_other_programs_get_the_remedy(model: str, meant: str) -> None:
    """Before the hub is asked, wherever a model is named."""
    with pytest.raises(CheckpointError) as caught:
        LLM(model)
    assert meant in str(caught.value)
    assert repr(model) in str(caught.value)


@pytest.mark.parametrize(
    ("model", "meant"),
    [
        *((name, name) for name in ("Qwen/Qwen3-0.6B", "gpt2", "a/b/c.gguf", "/no/such", "a:b/c")),
        ("a/b:Q8_0", "a/b:Q8_0"),
        ("hf.co/Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B"),
        ("hf.co/owner/Repo-GGUF:Q4_K_M", "owner/Repo-GGUF:Q4_K_M"),
        ("HuggingFace.co/owner/Repo-GGUF/x.gguf", "owner/Repo-GGUF/x.gguf"),
        ("https://huggingface.co/a/b/", "a/b"),
        ("https://huggingface.co/a/b/tree/main", "a/b"),
        ("https://huggingface.co/a/b/blob/main/d/c.gguf", "a/b/d/c.gguf"),
        ("https://huggingface.co/a/b/resolve/main/c.gguf?download=true", "a/b/c.gguf"),
    ],
)
def test_addresses_of_the_hub_are_ids(model: str, meant: str) -> None:
    assert hub_name(model) == meant
