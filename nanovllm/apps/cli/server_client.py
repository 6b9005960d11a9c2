"""The answers of a server, for `nanovllm chat --url`.

It follows no redirect, uses no proxy and checks certificates.
"""

import contextlib
import json
import os
import re
import ssl
from collections.abc import Iterable, Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

import httpx

from nanovllm.apps.cli.repl import AnswerPiece, Message, Source
from nanovllm.errors import ConfigError, InvalidRequestError, ServerError
from nanovllm.options.validation import shown
from nanovllm.utils.terminal import is_interactive

CONNECT_SECONDS = 10.0
"""How long a connection may take, and each wait for the list of models."""
MAX_BYTES = 2**24
"""Limit of an event's line."""
THINK = "<think>\n"
END_THINK = "\n</think>\n\n"
"""What stands around a server's reasoning in an answer, as models themselves write it."""


def find_server(url: str, api_key: str | None = None) -> httpx.Client:
    """Return a client of the server at `url`, such as http://127.0.0.1:8000, with or without /v1.

    Args:
        api_key: None takes the environment variable OPENAI_API_KEY, if it is set.

    Raises:
        ConfigError: the URL or the key cannot be sent.
    """
    try:
        parts = urlsplit(url)
        httpx.URL(url)
        is_sound = parts.hostname and parts.port != 0 and "@" not in parts.netloc
    except (ValueError, httpx.InvalidURL):
        is_sound = False
    if not is_sound or not re.fullmatch(r"https?://(?![^?#]*[?#])[!-~]+", url, re.IGNORECASE):
        rule = "the server's URL must be like http://127.0.0.1:8000, without a query"
        raise ConfigError(f"{rule}, got {shown(url)}")
    headers = {"Accept-Encoding": "identity"}
    if key := api_key or os.environ.get("OPENAI_API_KEY"):
        if not re.fullmatch(r"[!-~]+", key):
            raise ConfigError("the API key must be printable ASCII without spaces")
        headers["Authorization"] = f"Bearer {key}"
    return httpx.Client(
        base_url=url.rstrip("/").removesuffix("/v1"),
        headers=headers,
        timeout=httpx.Timeout(None, connect=CONNECT_SECONDS),
        trust_env=False,
        verify=ssl.create_default_context(),
    )


def model_card(server: httpx.Client, name: str | None = None) -> dict[str, Any]:
    """Return what the server lists of a model: at least its `id`.

    Without a name it is the first model of those that chat, if the server says so.

    Raises:
        ServerError: it lists none, cannot be reached, or refuses.
    """
    with _errors(server):
        response = server.get("/v1/models", timeout=CONNECT_SECONDS)
        _check_status(response)
    with contextlib.suppress(ValueError, RecursionError):
        match json.loads(response.content):
            case {"data": [{"id": str()}, *_] as cards}:
                known = [card for card in cards if isinstance(card, dict)]
                if name is not None:
                    return next((card for card in known if card.get("id") == name), {"id": name})
                chats = (card for card in known if card.get("chats") is not False)
                return next(chats, known[0])
    raise ServerError(f"{server.base_url} lists no model at /v1/models; name one")


def server_source(server: httpx.Client, model: str, fields: Mapping[str, Any]) -> Source:
    """Return the answers of a server's model; `fields` are further ones of each request.

    They raise InvalidRequestError for status 400, 413 or 422, and ServerError if the server cannot
    be reached, refuses, or breaks off. The connection ends when the answer is closed.
    """
    if is_interactive():  # where tokens a second are shown
        fields = {**fields, "stream_options": {"include_usage": True}}

    def answer(messages: list[Message]) -> Iterator[AnswerPiece]:
        sent = [{**message, "content": _without_reasoning(message)} for message in messages]
        body = {**fields, "model": model, "messages": sent, "stream": True}
        if "extra_args" in body:
            body["vllm_xargs"] = body.pop("extra_args")
        reasons = False
        end = None
        request = server.stream("POST", "/v1/chat/completions", json=body)
        with _errors(server), request as response:
            _check_status(response)
            kind = response.headers.get("Content-Type", "").partition(";")[0].strip()
            if kind != "text/event-stream":
                rule = "the server does not stream its answer: Content-Type must be"
                raise ServerError(f"{rule} text/event-stream, got {shown(kind)}")
            for data in events(response.iter_raw()):
                text, thought, reason, num_tokens = read_event(data)
                end = reason or end
                yield AnswerPiece(THINK * (bool(thought) and not reasons) + thought, num_tokens)
                reasons = reasons or bool(thought)
                yield AnswerPiece(END_THINK * (bool(text) and reasons) + text)
                reasons = reasons and not text
        if end in (None, "error", "abort"):
            raise ServerError(f"the server broke off its answer: {end or 'no reason is given'}")

    return answer


def events(pieces: Iterable[bytes]) -> Iterator[str]:
    """Yield the data of each server-sent event in bytes, which are cut anywhere.

    Raises:
        ServerError: an event has a line that is too long.
    """
    line = b""
    data: list[bytes] = []
    for piece in pieces:
        *lines, line = (line + piece).split(b"\n")
        for each in lines:
            each = each.removesuffix(b"\r")
            if each.startswith(b"data:"):
                data.append(each[5:].removeprefix(b" "))
            elif not each and data:
                yield b"\n".join(data).decode(errors="replace")
                data = []
        if len(line) > MAX_BYTES:
            raise ServerError(f"the server sends an event of more than {MAX_BYTES} bytes")


def read_event(data: str) -> tuple[str, str, str | None, int]:
    """Return what an event says of the answer: text, reasoning, why it ended, and all its tokens.

    Raises:
        ServerError: the event reports an error, or has another form.
    """
    if data == "[DONE]":
        return "", "", None, 0
    try:
        event = json.loads(data)
        if event.get("error"):
            raise ServerError(f"the server reports an error: {_message(data.encode())}")
        choice = (event.get("choices") or [{}])[0]
        delta = choice.get("delta") or {}
        text = delta.get("content") or ""
        thought = delta.get("reasoning_content") or delta.get("reasoning") or ""
        reason = choice.get("finish_reason")
        num_tokens = (event.get("usage") or {}).get("completion_tokens") or 0
        if all(isinstance(each, str) for each in (text, thought, reason or "")):
            return text, thought, reason, int(num_tokens)
    except (AttributeError, LookupError, TypeError, ValueError, RecursionError):
        pass
    raise ServerError(f"the server sends an event of an unknown form: {data:.200}")


def _without_reasoning(message: Message) -> Any:
    """Return a message's content without the reasoning that an answer begins with."""
    text = message["content"]
    reasons = message["role"] == "assistant" and text.startswith(THINK)
    return text.partition(END_THINK)[2] if reasons else text


def _check_status(response: httpx.Response) -> None:
    """Raise the error that an answer reports, if it does."""
    status = response.status_code
    if status != 200:
        kind = InvalidRequestError if status in (400, 413, 422) else ServerError
        raise kind(f"the server answers {status}: {_message(response.read())}")


@contextlib.contextmanager
def _errors(server: httpx.Client) -> Iterator[None]:
    """Raise what goes wrong on the way as a ServerError of one line."""
    try:
        yield
    except httpx.HTTPError as error:
        reason = " ".join(str(error).split()) or "it takes too long"
        if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
            raise ServerError(f"cannot reach {server.base_url}: {reason}") from None
        raise ServerError(f"the server broke off its answer: {reason}") from None


def _message(body: bytes) -> str:
    """Return the message in the body of an error, or the beginning of the body."""
    with contextlib.suppress(ValueError, RecursionError):
        value = json.loads(body)
        for name in ("error", "message", "detail"):
            if isinstance(value, dict) and value.get(name):
                value = value[name]
        return value if isinstance(value, str) else json.dumps(value)[:300]
    return " ".join(body[:300].decode(errors="replace").split()) or "without a reason"
