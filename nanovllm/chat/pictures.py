"""Pictures in conversations: the parts that name them, and their way through a chat template.

While a conversation is prepared, a picture is a mark in the text of its message. A template gets a
list of parts, or else text that it would have written itself.
"""

import base64
import binascii
import mimetypes
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence as Seq
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote, unquote_to_bytes, urlsplit

from nanovllm.core.messages import LowDetail
from nanovllm.errors import InvalidRequestError
from nanovllm.options.validation import shown

PICTURE_PARTS = ("image_url", "input_image", "image", "image_pil")
"""Types of content parts that are pictures."""

_MAX_SCHEME = 20
_OF_ADDRESSES = str.maketrans("-_", "+/")
_SECRET = secrets.token_hex(8)
_PICTURE = f"\ue000picture {_SECRET}\ue000"
_NEXT = f"\ue000next {_SECRET}\ue000"
_LITERAL = f"nvliteral{_SECRET}"
"""Stands for a marker in text that is no picture's, while a template renders."""

Conversation = list[dict[str, Any]]
Show = Callable[[dict[str, Any]], dict[str, Any]]
"""Returns a message as a template takes its pictures."""
Locate = Callable[[str], Path]
"""Returns the file of a path, or raises InvalidRequestError."""


class Rendered(NamedTuple):
    """The text of a conversation, with its special tokens in it."""

    text: str
    pictures: tuple[Any, ...] = ()
    marker_places: tuple[int, ...] = ()  # where each picture's marker begins in the text


def anywhere(path: str) -> Path:
    """Return any file: for callers in Python."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise InvalidRequestError(f"{shown(path)} is no path: {error}") from None


def nowhere(path: str) -> Path:
    """Refuse all files."""
    raise InvalidRequestError(
        f"{shown(path)} is a path, and this server reads no files: send the picture as data:, or "
        "start the server with allowed_local_media_path"
    )


def below(directory: Path) -> Locate:
    """Return what finds files in a directory or below it."""

    def locate(path: str) -> Path:
        try:
            found = (directory / path).resolve()
        except (OSError, RuntimeError, ValueError) as error:
            raise InvalidRequestError(f"{shown(path)} is no path: {error}") from None
        if not found.is_relative_to(directory.resolve()):
            raise InvalidRequestError(
                f"{shown(path)} is outside allowed_local_media_path, the only place of files that "
                "are read"
            )
        return found

    return locate


def is_picture(part: Any) -> bool:
    """Whether a content part is a picture."""
    return isinstance(part, Mapping) and part.get("type") in PICTURE_PARTS


def file_part(name: str) -> dict[str, Any]:
    """Return the content part of a picture's file, with its bytes in it.

    Raises:
        InvalidRequestError: the file cannot be read.
    """
    try:
        data = Path(name).expanduser().read_bytes()
    except (OSError, RuntimeError, ValueError) as error:
        raise InvalidRequestError(f"cannot read the picture {shown(name)}: {error}") from None
    kind = mimetypes.guess_type(name)[0] or "application/octet-stream"
    url = f"data:{kind};base64,{base64.b64encode(data).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def with_files(text: str, files: Seq[str]) -> Any:
    """Return the content of a message with pictures before its text; without files, the text."""
    if not files:
        return text
    return [*map(file_part, files), {"type": "text", "text": text}]


def with_marks(texts: list[str | None]) -> str:
    """Return the content of a message of these parts, of which None is a picture."""
    return _NEXT.join(_PICTURE if text is None else text for text in texts)


def picture_of(name: str, part: Mapping[str, Any], locate: Locate) -> Any:
    """Return the picture of a content part: bytes, a path, or an object of the caller's, in
    `LowDetail` if the part asks for that.

    Raises:
        InvalidRequestError: the part has none, or it is an address in a network.
    """
    kind = part["type"]
    given = part.get(kind)
    detail = part.get("detail")
    if kind == "input_image":
        given = part.get("image_url")
    elif kind == "image" and given is None:
        source = part.get("source")
        given = part.get("url", part.get("path")) if source is None else _source(name, source)
    if isinstance(given, Mapping):
        detail = given.get("detail", detail)
        given = given.get("url")
    if given is None:
        raise InvalidRequestError(
            f'{name} has a picture without content: give {{"type": "image_url", "image_url": '
            f'{{"url": "data:image/png;base64,..."}}}}, got {shown(part)}'
        )
    if detail not in (None, "auto", "high", "low", "original"):
        raise InvalidRequestError(
            f'{name}: the detail of a picture is "low", "high" or "auto", got {shown(detail)}'
        )
    found = _located(name, given, locate) if isinstance(given, str) else given
    return LowDetail(found) if detail == "low" else found


def _source(name: str, source: Any) -> Any:
    """Return the picture of Anthropic's `source`."""
    match source:
        case {"type": "base64", "data": str(data)}:
            return _decoded(name, data)
        case {"type": "url", "url": str(url)}:
            return url
    raise InvalidRequestError(
        f'{name}: the source of a picture is {{"type": "base64", "media_type": "image/png", '
        f'"data": ...}}, got {shown(source)}'
    )


def _located(name: str, given: str, locate: Locate) -> Any:
    url = given.strip()
    scheme, colon, rest = url[:_MAX_SCHEME].partition(":")
    scheme = scheme.lower() if colon else ""
    if scheme == "data":
        head, comma, data = url.partition(",")
        if not comma:
            raise InvalidRequestError(
                f"{name}: a data: address is data:image/png;base64,..., got {shown(url[:60])}"
            )
        if head.lower().endswith(";base64"):
            return _decoded(name, unquote(data) if "%" in data else data)
        return unquote_to_bytes(data)
    if scheme == "file":
        return locate(_path(name, url))
    if rest.startswith("//"):
        raise InvalidRequestError(
            f"{name}: {shown(url)} is an address, and nothing is fetched: download the picture, "
            "and send it as data:image/png;base64,..."
        )
    return locate(given)


def _path(name: str, url: str) -> str:
    """Return the path of an address file:."""
    try:
        parts = urlsplit(url)
    except ValueError:
        parts = None
    if parts is None or parts.netloc.lower() not in ("", "localhost"):
        raise InvalidRequestError(
            f"{name}: a file: address is file:///path of this machine, got {shown(url)}"
        )
    return unquote(parts.path)


def _decoded(name: str, data: str) -> bytes:
    """Return the bytes of base64, also of its alphabet for addresses, and without its end."""
    plain = "".join(data.split()).translate(_OF_ADDRESSES).rstrip("=")
    try:
        return base64.b64decode(plain + "=" * (-len(plain) % 4), validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidRequestError(f"{name}: the picture is not valid base64: {error}") from error


def forms(conversation: Conversation, placeholder: str) -> Iterator[tuple[Conversation, Show]]:
    """Yield a conversation, and how a template may be shown its messages: with pictures as parts;
    as text, `placeholder` for each; and as parts, those of tools in a message of the user after
    the results.
    """
    yield conversation, _as_parts
    yield conversation, partial(_as_text, placeholder=placeholder)
    moved: Conversation = []
    waiting: list[str] = []
    for message in [*conversation, {"role": ""}]:
        if waiting and message["role"] != "tool":
            moved.append({"role": "user", "content": _NEXT.join(waiting)})
            waiting = []
        if message["role"] == "tool" and _PICTURE in message["content"]:
            texts = message["content"].split(_NEXT)
            waiting += [text for text in texts if text == _PICTURE]
            message = {**message, "content": "\n".join(t for t in texts if t != _PICTURE)}
        moved.append(message)
    yield moved[:-1], _as_parts


def _as_parts(message: dict[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    if not isinstance(content, str) or _PICTURE not in content:
        return message
    parts: list[dict[str, Any]] = []
    for text in content.replace(_PICTURE, f"{_NEXT}{_PICTURE}{_NEXT}").split(_NEXT):
        if text == _PICTURE:
            parts.append({"type": "image"})
        elif text:
            parts.append({"type": "text", "text": text})
    return {**message, "content": parts}


def _as_text(message: dict[str, Any], placeholder: str) -> dict[str, Any]:
    content = message.get("content")
    if not isinstance(content, str) or _PICTURE not in content:
        return message
    return {**message, "content": content.replace(_PICTURE, placeholder).replace(_NEXT, "\n")}


def hide(value: Any, marker: str) -> Any:
    """Return JSON values in whose texts nothing is a picture's marker."""
    if isinstance(value, str):
        return value.replace(marker, _LITERAL)
    if isinstance(value, Mapping):
        return {key: hide(each, marker) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [hide(each, marker) for each in value]
    return value


def with_pictures(text: str, marker: str, pictures: Seq[Any]) -> Rendered:
    """Return a template's text, in which each marker is a picture's; then others appear again."""
    first, *parts = (part.replace(_LITERAL, marker) for part in text.split(marker))
    places = []
    for part in parts:
        places.append(len(first))
        first += marker + part
    return Rendered(first, tuple(pictures), tuple(places))
