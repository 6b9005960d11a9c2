"""Errors as answers: every error leaves the server with a status and the JSON body of its API."""

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence as Seq
from contextlib import contextmanager
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.responses import Response

from nanovllm.errors import (
    EngineDeadError,
    InvalidRequestError,
    NanoVLLMError,
    PromptTooLongError,
)
from nanovllm.options.other_names import REMEDIES
from nanovllm.options.validation import did_you_mean, listed, shown

_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "overloaded_error",
    504: "timeout_error",
}
"""OpenAI's kinds of errors by status; others are an "invalid_request_error"."""
_ANTHROPIC_TYPES = {
    **_TYPES,
    403: "permission_error",
    413: "request_too_large",
    500: "api_error",
}
"""Anthropic's kinds of errors by status; others are an "invalid_request_error"."""
_OBJECT = ("dict_type", "model_type", "model_attributes_type")
"""Pydantic's errors for what should be an object of JSON."""
_MOST_NAMES = 8
"""Models and adapters that an error lists."""
_NOT_TEXT = ("image", "document", "video", "audio", "file", "base64", "url")


class ErrorFields(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class Error(BaseModel):
    """The body of every error, as the schema shows it."""

    error: ErrorFields


class APIError(HTTPException):
    """An error that a client is told.

    Args:
        status: the HTTP status.
        type: OpenAI's kind of error; None is that of the status.
        param: the field of the request that the error is about.
        code: OpenAI's name of the error.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str | None = None,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(status, message, headers)
        type = type or _TYPES.get(status, "invalid_request_error")
        self.body = {"error": {"message": message, "type": type, "param": param, "code": code}}

    def response(self, path: str) -> Response:
        """Return the answer that carries this error, in the form of the route `path`."""
        is_anthropic = path.startswith("/v1/messages")
        text = json.dumps(anthropic_body(self) if is_anthropic else self.body)
        headers = dict(self.headers or {})
        return Response(text, self.status_code, headers, media_type="application/json")


def unknown_model(name: str | None, known: Seq[str]) -> APIError:
    """Return the error for a request that names a model which is not one of those `known`."""
    names = listed([*map(shown, known)], _MOST_NAMES)
    message = f"the model {shown(name)} does not exist; this server has {names}"
    return APIError(404, message, param="model", code="model_not_found")


def anthropic_body(error: APIError) -> dict[str, Any]:
    """Return the body of an error in Anthropic's form."""
    kind = _ANTHROPIC_TYPES.get(error.status_code, "invalid_request_error")
    message = error.body["error"]["message"] or ""
    if message.startswith("the prompt is too long"):  # agents know Anthropic's by its beginning
        message = message.removeprefix("the ")
    found: dict[str, Any] = {"type": kind, "message": message}
    if (code := error.body["error"]["code"]) is not None:
        found["details"] = {"error_code": code}
    return {"type": "error", "error": found}


def route_path(scope: Mapping[str, Any]) -> str:
    """Return the path of a request without the path under which a proxy has the server."""
    path: str = scope["path"]
    prefix: str = scope.get("root_path", "")
    return path[len(prefix) :] or "/" if f"{path}/".startswith(f"{prefix}/") else path


def as_api_error(error: BaseException) -> APIError:
    """Return what a client is told of an error; nothing from inside an unexpected error."""
    if isinstance(error, APIError):
        return error
    if isinstance(error, RequestValidationError):
        return _validation_error(error)
    if isinstance(error, InvalidRequestError):
        return APIError(400, str(error), code=_code(error))
    if isinstance(error, NanoVLLMError):
        code = "engine_dead" if isinstance(error, EngineDeadError) else None
        return APIError(500, str(error), code=code)
    if isinstance(error, HTTPException):
        return APIError(error.status_code, str(error.detail), headers=error.headers)
    return APIError(500, "the server failed; its log says why")


@contextmanager
def naming_params(
    fields: Collection[str], prompt: str, renamed: Mapping[str, str] | None = None
) -> Iterator[None]:
    """Turn an InvalidRequestError into status 400 with the field that its message names first.

    Args:
        fields: the fields of the request.
        prompt: the field that holds the prompt, for messages that name no field.
        renamed: by the engine's name of a parameter, the field that it came from.
    """
    try:
        yield
    except InvalidRequestError as error:
        message = str(error)
        param = _param(message, fields, prompt, renamed or {})
        raise APIError(400, message, param=param, code=_code(error)) from None


def _code(error: InvalidRequestError) -> str | None:
    return "context_length_exceeded" if isinstance(error, PromptTooLongError) else None


def _param(
    message: str, fields: Collection[str], prompt: str, renamed: Mapping[str, str]
) -> str | None:
    if found := re.match(r"message (\d+)\b", message):
        return f"{prompt}[{found[1]}]"
    if re.match(r"(the )?prompt\b|the conversation\b", message):
        return prompt
    for word in re.findall(r"\w+", message):
        if word in renamed:
            return renamed[word]
        if word in fields:
            return str(word)
    return prompt


def _validation_error(error: RequestValidationError) -> APIError:
    """Return one of pydantic's errors in plain words."""
    first, place, others = _broken_rule(error)
    context = first.get("ctx") or {}
    if first["type"] == "refused":
        param = _path([*place, context["field"]])
        return APIError(400, context["message"], param=param, code=context["code"])
    param = _path(place)
    if first["type"] == "union_tag_invalid":
        tags = context["expected_tags"].replace(", ", " or ").replace("'", "")
        what = f"{param} must be of type {tags}, got {shown(context['tag'])}"
        if context["tag"] in _NOT_TEXT:
            what += ": the models here read text only; send it as a text block"
    elif first["type"] == "missing":
        what = f"{param} is missing" if param else "the request has no body: send JSON"
    else:
        rule = " or ".join([_rule(first), *(_rule(e).removeprefix("should be ") for e in others)])
        what = f"{param or 'the body'} {rule}, got {shown(first.get('input'))}"
    return APIError(400, what, param=param or None)


def _broken_rule(
    error: RequestValidationError,
) -> tuple[dict[str, Any], list[Any], list[dict[str, Any]]]:
    """Return the first error, its place, and further kinds that the value there may have.

    Of a field that takes several kinds there is an error for each. One says more than that the
    kind is wrong if the value has the kind: that is the one to tell.
    """
    found = [(_place_of(each, error.body), each) for each in error.errors()]
    place, first = found[0]
    found = [(at, each) for at, each in found if at[: len(place)] == place]
    inside = [(at, each) for at, each in found if len(at) > len(place) or not _is_kind(each)]
    if inside and _is_kind(first):
        place, first = next((one for one in inside if not _is_kind(one[1])), inside[0])
    elif _is_kind(first) and not (first["type"] == "literal_error" and type(first["input"]) is str):
        return first, place, [each for _, each in found[1:] if _rule(each) != _rule(first)]
    return first, place, []


def _is_kind(error: Mapping[str, Any]) -> bool:
    """Whether an error says only that a value is of another kind."""
    kind: str = error["type"]
    return kind.endswith("_type") or kind == "literal_error"


def _rule(error: Mapping[str, Any]) -> str:
    rule = "should be an object" if error["type"] in _OBJECT else error["msg"]
    rule = rule.removeprefix("Input ").removeprefix("List ")
    return rule[:1].lower() + rule[1:]


def _place_of(error: Mapping[str, Any], body: Any) -> list[Any]:
    place: Seq[Any] = error["loc"]
    if place[0] != "body":  # of the path or the query
        return list(place[1:])
    return _place(place[1:], body, missing=error["type"] == "missing")


def _place(parts: Seq[Any], value: Any, *, missing: bool) -> list[Any]:
    """Return the keys and indices of the body `value` among `parts`: others name types.

    The last part is a key that the body lacks if it is `missing`.
    """
    place = []
    for index, part in enumerate(parts):
        is_key = isinstance(value, dict) and part in value
        if is_key or (isinstance(value, list) and isinstance(part, int)):
            place.append(part)
            value = value[part]
        elif missing and index == len(parts) - 1:
            place.append(part)
    return place


def _path(place: Seq[Any]) -> str:
    """Return a place in the body, such as messages[0].content."""
    text = ""
    for part in place:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            text += f".{part}" if text else str(part)
    return text


def add_error_handlers(
    app: FastAPI, paths: Collection[str], switched_off: Mapping[str, str] | None = None
) -> None:
    """Give every error of `app` a body in the form of its API.

    Args:
        switched_off: by the path of a route that it has not, the flag that adds it.
    """
    known = list(dict.fromkeys(paths))
    flags = (switched_off or {}).items()
    remedies = {path: f"start the server with {flag}" for path, flag in flags}
    remedies |= REMEDIES

    async def handle(request: Request, error: Exception) -> Response:
        found = as_api_error(error)
        path = route_path(request.scope)
        if found is not error and found.status_code in (404, 405):  # the router's
            given = path.rstrip("/")
            if found.status_code == 404 or (given in remedies and given not in known):
                found = _unknown_route(path, known, remedies)
            elif allowed := (found.headers or {}).get("Allow"):
                what = f"{path} takes {allowed}, not {request.method[:20]}"
                found = APIError(405, what, headers=found.headers)
        return found.response(path)

    for kind in (RequestValidationError, HTTPException, NanoVLLMError, Exception):
        app.add_exception_handler(kind, handle)


def _unknown_route(path: str, known: Collection[str], remedies: Mapping[str, str]) -> APIError:
    """Return the error for a path without a route: its remedy, or what was meant.

    A client adds the end of a path to a base that may have too much of it, or too little.
    """
    given = f"/{path.strip('/')}"
    ends = [each for each in known if given.endswith(each) or each.endswith(given)]
    ends = [each for each in ends if given != "/" != each]
    if given in remedies:
        hint = f": {remedies[given]}"
    elif ends:
        nearest = min(ends, key=lambda each: abs(len(each) - len(given)))
        hint = f"; did you mean {nearest!r}?"
    else:
        hint = did_you_mean(given, known)
    if not hint.startswith((":", "; did")):
        hint = "; /openapi.json lists all"
    return APIError(404, f"there is no route {shown(path)}{hint}")
