"""A server with OpenAI's API that is asked for completions, and the prompts for it."""

import os
import random
import sys
from typing import Any

import httpx

from nanovllm import demo_model
from nanovllm.apps.prove.requests import Bits

SECONDS = 900.0
"""How long a server may take for one answer."""


def texts(count: int) -> list[str]:
    """Return `count` prompts; many begin alike."""
    rng = random.Random(0)
    entries = demo_model.entries()
    whole = [f"{question}\n{answer}" for question, answer in entries]
    questions = [question for question, _ in entries[4:]]
    return [
        "\n\n".join([*whole[: rng.choice([0, 1, 2, 4])], questions[index % len(questions)]])
        for index in range(count)
    ]


class Server:
    """A server. The environment variable OPENAI_API_KEY may hold its key.

    A call ends the process with a message if the server is not there, refuses, or answers in
    another form.
    """

    def __init__(self, url: str) -> None:
        key = os.environ.get("OPENAI_API_KEY")
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._url = url.rstrip("/").removesuffix("/v1")
        self._client = httpx.AsyncClient(headers=headers, timeout=SECONDS, trust_env=False)
        self._model = ""

    async def __aenter__(self) -> "Server":
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._client.aclose()

    async def choose(self, model: str | None) -> None:
        """Ask this model from now on; None is the server's first."""
        self._model = model or (await self._call("GET", "/v1/models"))["data"][0]["id"]

    async def complete(self, index: int, prompt: str) -> Bits:
        """Return the bits of a completion; its tokens are the bytes of its text."""
        body = {
            "model": self._model,
            "prompt": prompt,
            "max_tokens": 16 + index % 33,
            "temperature": 0.8 * (index % 2),
            "seed": index,
            "logprobs": 2,
        }
        choice = (await self._call("POST", "/v1/completions", body))["choices"][0]
        logprobs = choice.get("logprobs") or {}
        values = logprobs.get("token_logprobs")
        if values is None:  # llama.cpp's form
            values = [each["logprob"] for each in logprobs.get("content") or ()]
        at_tokens = tuple(((0, float(value)),) for value in values)
        return Bits(tuple(choice["text"].encode("utf-8", "replace")), at_tokens, ())

    async def _call(self, method: str, path: str, body: Any = None) -> Any:
        try:
            response = await self._client.request(method, self._url + path, json=body)
            response.raise_for_status()
            return response.json()
        except (httpx.HTTPError, ValueError) as error:
            sys.exit(f"{self._url}{path}: {error or type(error).__name__}")
