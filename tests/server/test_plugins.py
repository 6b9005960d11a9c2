"""vllm_xargs: requests ask for the logits rules that the server was given, by name."""

from collections.abc import Iterator
from typing import Any

import pytest
from openai import BadRequestError, OpenAI

from nanovllm import AsyncLLM, demo_model
from tests.server.conftest import running

PROMPT: Any = [{"role": "user", "content": "What is a KV cache?"}]


@pytest.fixture(scope="module")
def ruled(front: str) -> Iterator[OpenAI]:
    """OpenAI's client of a server with a rule."""
    rule = "nanovllm.apps.lab.templates.rule:MyRule"
    llm = AsyncLLM(demo_model.MODEL, max_model_len=512, num_kvcache_blocks=64, logits_rules=[rule])
    with running(llm) as found:
        yield found.client()
    llm.shutdown()


def answer(client: OpenAI, vllm_xargs: Any) -> str | None:
    body = {"vllm_xargs": vllm_xargs, "return_token_ids": True}
    found = client.chat.completions.create(
        model="model", messages=PROMPT, temperature=0, max_tokens=12, extra_body=body
    )
    return found.choices[0].message.content


def test_a_request_has_a_rule(ruled: OpenAI, client: OpenAI) -> None:
    assert answer(ruled, None) == answer(ruled, {}) == answer(client, None)
    assert answer(ruled, {"my_rule": 500}) != answer(client, None)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"my_rul": 8}, "extra_args names 'my_rul', which is no logits rule of this engine; did"),
        ({"os:system": "true"}, "extra_args names 'os:system', which is no logits rule"),
        ({"nanovllm.apps.lab.templates.rule:MyRule": 8}, "which is no logits rule"),
        ({"my_rule": None}, "my_rule None: give a number of tokens from 1 to 1000"),
        ({f"rule{number}": 1 for number in range(65)}, "at most 64"),
        ("my_rule", "vllm_xargs should be an object"),
    ],
)
def test_what_is_no_rule_is_refused(ruled: OpenAI, given: Any, message: str) -> None:
    with pytest.raises(BadRequestError) as raised:
        answer(ruled, given)
    assert message in raised.value.message
    assert raised.value.param == "vllm_xargs"


def test_a_server_without_rules_says_so(client: OpenAI) -> None:
    with pytest.raises(BadRequestError, match="logits rule of this engine, which was made without"):
        answer(client, {"my_rule": 8})
