"""What a request must pass before a route sees it: headers, host, API key, size of the body.

Pure ASGI.
"""

import base64
import contextlib
import hashlib
import hmac
import re

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nanovllm.apps.server import pages
from nanovllm.apps.server.error_bodies import APIError, route_path
from nanovllm.apps.server.server_options import ServerOptions
from nanovllm.options.validation import shown

OPEN_PATHS = frozenset({"/health", "/ready"}) | pages.PATHS
"""What needs no API key; the pages have no data, and ask for the key."""
MAX_HEADERS = 100
MAX_HEAD_BYTES = 32 * 2**10
_MAX_DROPPED_BYTES = 64 * 2**20


def guard(app: Starlette, options: ServerOptions) -> None:
    """Let an app answer only what the options allow, to pages of the origins that they name."""
    app.add_middleware(GuardMiddleware, options=options)
    if options.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(options.cors_origins),
            allow_methods=["*"],
            allow_headers=["*"],
        )


class GuardMiddleware:
    """Refuses requests with dangerous headers, without an API key, or with too large a body."""

    def __init__(self, app: ASGIApp, options: ServerOptions) -> None:
        self._app = app
        self._allowed_hosts = options.allowed_hosts
        self._keys = [key.encode() for key in options.api_keys]
        self._max_body_bytes = options.max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        try:
            length = _content_length(headers)
            self._check_host(headers)
            if self._keys and route_path(scope) not in OPEN_PATHS:
                scope.setdefault("state", {})["key_digest"] = self._key_digest(headers)
            if length is not None and length > self._max_body_bytes:
                await _drop_body(headers, receive, length)
                raise self._too_large()
        except APIError as error:
            error.headers = {**(error.headers or {}), "Connection": "close"}
            await error.response(route_path(scope))(scope, receive, send)
            return
        await self._app(scope, self._limited(receive), send)

    def _check_host(self, headers: Headers) -> None:
        """Raise APIError, status 421, if a header names another host, whatever the port."""
        if (allowed := self._allowed_hosts) is None:
            return
        for given in map(str.lower, headers.getlist("host")):
            if re.sub(r":\d*$", "", given) not in allowed:
                raise APIError(
                    421,
                    f"the header Host is {shown(given)}; without API keys this server answers "
                    f"only to {', '.join(sorted(allowed))}: give it an --api-key",
                    code="wrong_host",
                )

    def _limited(self, receive: Receive) -> Receive:
        """Return `receive` with a limit on the bytes, for bodies that do not say their length."""
        num_bytes = 0

        async def limited() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > self._max_body_bytes:
                raise self._too_large()
            return message

        return limited

    def _too_large(self) -> APIError:
        return APIError(
            413,
            f"the body is larger than {self._max_body_bytes} bytes, the server's max_body_bytes",
            headers={"Connection": "close"},
        )

    def _key_digest(self, headers: Headers) -> str:
        """Return a digest of the request's API key, which does not give the key away.

        Every key is compared, each in constant time.
        """
        given = headers.getlist("x-api-key")
        for value in headers.getlist("authorization"):
            scheme, _, token = value.partition(" ")
            given.append(_key_of(scheme.lower(), token.strip(" \t")))
        if len(set(given)) == 1:
            key = given[0].encode("latin-1")
            matches = [hmac.compare_digest(key, own) for own in self._keys]
            if any(matches):
                return hashlib.sha256(key).hexdigest()[:16]
        raise APIError(
            401,
            "the API key is missing or wrong: send the header Authorization: Bearer KEY",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )


def _key_of(scheme: str, token: str) -> str:
    """Return the key in a header Authorization; "" if there is none.

    It is the password of a URL, http://user:KEY@host, which clients without an option for keys
    send in HTTP's basic scheme.
    """
    if scheme == "bearer":
        return token
    with contextlib.suppress(ValueError):
        if scheme == "basic":
            return base64.b64decode(token, validate=True).decode("latin-1").partition(":")[2]
    return ""


async def _drop_body(headers: Headers, receive: Receive, length: int) -> None:
    """Read and discard a body of `length` bytes, unless it is huge.

    A client that is still sending when the connection closes never reads the answer. One that sent
    "Expect" reads it before it sends.
    """
    if length > _MAX_DROPPED_BYTES or "expect" in headers:
        return
    while (await receive()).get("more_body"):
        pass


def _content_length(headers: Headers) -> int | None:
    """Return the length that the headers give, None without one.

    Raises:
        APIError: there are too many headers, or two ways to tell where the body ends.
    """
    if len(headers) > MAX_HEADERS:
        raise APIError(431, f"the request has more than {MAX_HEADERS} headers")
    if sum(len(name) + len(value) for name, value in headers.raw) > MAX_HEAD_BYTES:
        raise APIError(431, f"the request has more than {MAX_HEAD_BYTES} bytes of headers")
    lengths = headers.getlist("content-length")
    if len(lengths) + ("transfer-encoding" in headers) > 1:
        raise APIError(400, "the request gives its length twice: send one Content-Length")
    if not lengths:
        return None
    if not re.fullmatch(r"[0-9]{1,18}", lengths[0]):
        raise APIError(400, "the header Content-Length is not a number")
    return int(lengths[0])
