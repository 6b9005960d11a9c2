"""Which words are meant as models, and what the message offers in their place."""

import pytest

from nanovllm import LLM
from nanovllm.errors import CheckpointError
from nanovllm.options.model_names import looks_like_model, other_form


@pytest.mark.parametrize(
    "word",
    [
        *(
            "llama3.2",
            "qwen3:0.6b",
            "Mistral-7B",
            "gpt-oss",
            "gpt-oss:20b",
            "phi4",
            "gemma3:latest",
        ),
        *(
            "gemma3:latest",
            "Meta-Llama-3-8B-Instruct",
            "smollm2",
            "command-r:35b",
            "nous-hermes-2-7b.Q4_K_M",
        ),
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


@pytest.mark.parametrize(
    ("model", "meant"),
    [
        ("qwen3:0.6b", "did you mean one such as 'Qwen/Qwen3-0.6B'?"),
        ("Llama-3.2-1B", "did you mean one such as 'meta-llama/Llama-3.2-1B-Instruct'?"),
        ("command-r:35b", "a hub id, which is OWNER/NAME"),
        ("hf.co/Qwen/Qwen3-0.6B", "give the hub id alone, 'Qwen/Qwen3-0.6B'"),
        ("https://huggingface.co/a/b/tree/main", "give the hub id alone, 'a/b'"),
        ("https://huggingface.co/a/b/blob/main/c.gguf", "give the hub id alone, 'a/b/c.gguf'"),
        ("https://hf.co/", "give the hub id alone, 'OWNER/NAME'"),
        ("hf.co/owner/Repo-GGUF:Q4_K_M", "give the hub id alone, 'owner/Repo-GGUF:Q4_K_M'"),
    ],
)
def test_names_of_other_programs_get_the_remedy(model: str, meant: str) -> None:
    """Before the hub is asked, wherever a model is named."""
    with pytest.raises(CheckpointError) as caught:
        LLM(model)
    assert meant in str(caught.value)
    assert repr(model) in str(caught.value)


@pytest.mark.parametrize(
    "model", ["Qwen/Qwen3-0.6B", "gpt2", "a/b/c.gguf", "/no/such", "a:b/c", "a/b:Q8_0"]
)
def test_other_names_are_left_to_the_hub(model: str) -> None:
    assert other_form(model) is None
