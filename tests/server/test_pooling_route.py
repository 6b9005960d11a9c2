"""/v1/embeddings, /pooling, /v1/score and /rerank over HTTP, with the clients of others."""

import base64
import socket
import struct
from typing import Any

import numpy as np
import openai
import pytest
from openai import OpenAI

from tests.server.conftest import Running

pytestmark = pytest.mark.usefixtures("idle_afterwards")
EMBEDDINGS = "/v1/embeddings"
SCORES = {
    "/v1/rerank": {"query": "q", "documents": ["a"]},
    "/v1/score": {"text_1": "q", "text_2": ["a"]},
    EMBEDDINGS: {"input": "a"},
    "/pooling": {"input": "a"},
}


def test_openais_client_gets_the_same_numbers_in_both_forms(client: OpenAI) -> None:
    texts = ["paged attention", "What is a KV cache?", "é漢字🙂"]
    floats = client.embeddings.create(model="model", input=texts, encoding_format="float")
    coded = client.embeddings.create(model="model", input=texts)  # it asks for base64
    assert [each.index for each in floats.data] == [0, 1, 2]
    for one, other in zip(floats.data, coded.data, strict=True):
        assert one.object == "embedding"
        assert one.embedding == pytest.approx(other.embedding)
        assert np.linalg.norm(one.embedding) == pytest.approx(1)
    assert floats.usage.prompt_tokens == floats.usage.total_tokens > 6
    cut = client.embeddings.create(model="model", input=texts[0], dimensions=16)
    assert len(cut.data[0].embedding) == 16
    assert np.linalg.norm(cut.data[0].embedding) == pytest.approx(1)


def test_token_ids_are_texts(server: Running) -> None:
    tokens = server.send("/tokenize", {"prompt": "paged attention"}).body["tokens"]
    forms = "paged attention", ["paged attention"], tokens, [tokens]
    found = [server.send(EMBEDDINGS, {"input": form}).body["data"][0] for form in forms]
    assert all(each == found[0] for each in found)
    raw = server.send(EMBEDDINGS, {"input": tokens, "encoding_format": "base64"}).body["data"][0]
    numbers = struct.unpack("<128f", base64.b64decode(raw["embedding"]))
    assert list(numbers) == found[0]["embedding"]
    assert server.send("/pooling", {"input": tokens}).body["data"][0]["data"] == list(numbers)


def test_many_texts_at_once(server: Running) -> None:
    texts = [f"text {index % 7}" for index in range(300)]
    data = server.send(EMBEDDINGS, {"input": texts}).body["data"]
    assert [each["index"] for each in data] == list(range(300))
    assert all(data[i]["embedding"] == data[i % 7]["embedding"] for i in range(300))


def test_scores_and_ranks_agree(server: Running) -> None:
    documents = ["cats", "What is a KV cache?", "dogs"]
    query = "What is a KV cache?"
    scored = server.send("/v1/score", {"text_1": query, "text_2": documents}).body
    scores = [each["score"] for each in scored["data"]]
    assert scores[1] == pytest.approx(1, abs=1e-3)
    same = server.send("/score", {"queries": [query] * 3, "documents": documents}).body
    assert [each["score"] for each in same["data"]] == scores
    body = {"query": query, "documents": [documents[0], {"text": documents[1]}, documents[2]]}
    ranked = server.send("/rerank", {**body, "top_n": 2}).body
    assert ranked["results"][0]["index"] == 1
    assert ranked["results"][0]["document"] == {"text": documents[1]}
    assert len(ranked["results"]) == 2
    everything = server.send("/v2/rerank", {**body, "max_tokens_per_doc": 0}).body["results"]
    assert [each["relevance_score"] for each in everything] == sorted(scores, reverse=True)
    assert all("document" not in each for each in everything)
    more = [{"text": text, "id": index, "title": "t"} for index, text in enumerate(documents)]
    long = {"query": f"{query} " * 4, "documents": more}
    whole = server.send("/rerank", long).body
    assert [each["document"]["id"] for each in whole["results"]] == [
        each["index"] for each in whole["results"]
    ]
    cut = server.send("/rerank", {**long, "max_tokens_per_doc": 12}).body
    assert cut["results"] == whole["results"]  # no document has so many tokens, and the query may
    shorter = server.send("/rerank", {**long, "max_tokens_per_doc": 2}).body["usage"]
    own = server.send("/v1/embeddings", {"input": long["query"]}).body["usage"]["prompt_tokens"]
    assert shorter["prompt_tokens"] == len(documents) * (own + 2)


@pytest.mark.parametrize(
    ("path", "body", "param", "message"),
    [
        (EMBEDDINGS, {"input": []}, "input", "at least 1"),
        (EMBEDDINGS, {"input": [1] * 2000}, "input", "max_model_len"),
        (EMBEDDINGS, {"input": "a " * 5000}, "input", "max_model_len"),
        (EMBEDDINGS, {"input": "a", "dimensions": 4096}, "dimensions", "at most 128"),
        (EMBEDDINGS, {"input": "a", "encoding_format": "int8"}, "encoding_format", "base64"),
        (EMBEDDINGS, {"input": "a", "prompt_name": "q"}, "prompt_name", "not a prompt"),
        (EMBEDDINGS, {"input": "a", "pooling": "max"}, "pooling", "one of last, mean, cls"),
        (EMBEDDINGS, {"input": ["a", 7]}, "input[1]", "string"),
        (EMBEDDINGS, {"input": [5000]}, "input", "prompt token 0"),
        (EMBEDDINGS, {"input": ["a", "b " * 5000]}, "input", "input[1]: the prompt is too long"),
        (
            EMBEDDINGS,
            {"input": "a", "truncate_prompt_tokens": 9999},
            "truncate_prompt_tokens",
            "-1",
        ),
        (EMBEDDINGS, {"input": "a", "temperature": 1}, "temperature", "no field"),
        (EMBEDDINGS, {"input": ["a"] * 2049}, "n", "2049"),
        ("/pooling", {"input": "a", "task": "classify"}, "task", "not supported"),
        ("/v1/score", {"text_1": ["a", "b"], "text_2": ["c"]}, "text_1", "2 texts"),
        ("/v1/score", {"text_1": "a", "text_2": ["c", ""]}, "text_2", "text_2[1]: the prompt is"),
        ("/v1/score", {"text_1": "a"}, "text_2", "missing"),
        ("/v1/score", {"query": "a", "items": ["b"]}, "items", "known: instruction, model,"),
        ("/rerank", {"query": "a", "texts": ["b"]}, "texts", "known: documents, instr"),
        ("/rerank", {"query": "a", "documents": []}, "documents", "at least 1"),
        ("/rerank", {"query": "a", "documents": [{"title": "b"}]}, "documents[0].text", "missing"),
        (
            "/rerank",
            {"query": "a", "documents": ["b", ""]},
            "documents",
            "documents[1]: the prompt",
        ),
        ("/rerank", {"query": "a", "documents": ["b"], "top_n": -1}, "top_n", "greater"),
        ("/rerank", {"query": "a", "documents": ["b"], "instruction": "c"}, "instruction", "rera"),
        ("/rerank", {"query": "a", "documents": ["b " * 5000]}, "documents", "max_model_len"),
    ],
)
def test_what_is_refused(
    server: Running, path: str, body: dict[str, Any], param: str, message: str
) -> None:
    reply = server.send(path, body)
    assert reply.status == 400
    assert message in reply.error["message"]
    assert reply.error["param"] == param


@pytest.mark.parametrize(("path", "body"), SCORES.items())
def test_other_models_are_unknown(server: Running, path: str, body: dict[str, Any]) -> None:
    assert server.send(path, {**body, "model": "other"}).status == 404


def test_errors_of_the_client_library(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="at most 128") as caught:
        client.embeddings.create(model="model", input="a", dimensions=1000)
    assert caught.value.param == "dimensions"


def test_a_client_that_goes_away_frees_its_place(server: Running) -> None:
    body = '{"input": [' + ",".join([f'"paged attention {i}"' for i in range(500)]) + "]}"
    with socket.create_connection((server.host, server.port)) as connection:
        head = f"POST {EMBEDDINGS} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json"
        connection.sendall(f"{head}\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode())
    assert server.send(EMBEDDINGS, {"input": "a"}).status == 200
