"""The forms in which callers give a prompt, and the one value that they become."""

from typing import Any

import numpy as np
import pytest
import torch

from nanovllm.engine.prompt import Prompt, as_list, make_prompt

RENDERED = Prompt("<|im_start|>", rendered=True, salt="s")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("text", Prompt("text")),
        ([1, 2], Prompt(token_ids=[1, 2])),
        (np.array([1, 2]), Prompt(token_ids=[1, 2])),
        (torch.tensor([1, 2]), Prompt(token_ids=[1, 2])),
        ({"prompt": "text", "prompt_token_ids": None}, Prompt("text")),
        ({"prompt_token_ids": np.array([1])}, Prompt(token_ids=[1])),
        ({"prompt_token_ids": []}, Prompt(token_ids=[])),
        (
            {"prompt": "text", "prompt_token_ids": [1], "cache_salt": "s"},
            Prompt("text", [1], salt="s"),
        ),
        (RENDERED, RENDERED),
    ],
    ids=repr,
)
def test_each_form_becomes_a_prompt(given: Any, expected: Prompt) -> None:
    assert make_prompt(given) == expected


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("text", ["text"]),
        (RENDERED, [RENDERED]),
        ([1, 2], [[1, 2]]),
        (np.array([1, 2]), [[1, 2]]),
        (np.array([[1], [2]]), [[1], [2]]),
        ([[1], "text", RENDERED], [[1], "text", RENDERED]),
        ({"prompt": "text"}, [{"prompt": "text"}]),
        ([], []),
    ],
    ids=repr,
)
def test_one_prompt_is_a_list_of_one(given: Any, expected: list[Any]) -> None:
    assert as_list(given) == expected
