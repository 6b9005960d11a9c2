"""What a request must pass before a route sees it: headers, host, API key, size of the body.

Pure ASGI. Knows no routes but those that are open to everyone.
"""

import hashlib
import hmac
import re

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nanovllm.options.validation import shown
from nanovllm.server.error_bodies import APIError

OPEN_PATHS = frozenset({"/", "/health", "/ready"})
"""What needs no API key; / is a page without data, which asks for the key."""
MAX_HEADERS = 100
MAX_HEAD_BYTES = 32 * 2**10
"""Of a request's line and headers."""
_MAX_DROPPED_BYTES = 64 * 2**20


class GuardMiddleware:
    """Refuses requests with dangerous headers, without an API key, or with too large a body.

    Args:
        allowed_hosts: names in the header Host, without the port; None is any.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        api_keys: tuple[str, ...],
        allowed_hosts: frozenset[str] | None,
        max_body_bytes: int,
    ) -> None:
        self._app = app
        self._allowed_hosts = allowed_hosts
        self._keys = [key.encode() for key in api_keys]
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check a request and pass it on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            length = _content_length(scope["headers"])
            self._check_host(scope["headers"])
            if self._keys and scope["path"] not in OPEN_PATHS:
                scope.setdefault("state", {})["key_digest"] = self._key_digest(scope["headers"])
            if length is not None and length > self._max_body_bytes:
                await _drop_body(scope["headers"], receive, length)
                raise self._too_large()
        except APIError as error:
            error.headers = {**(error.headers or {}), "Connection": "close"}
            await error.response()(scope, receive, send)
            return
        await self._app(scope, self._limited(receive), send)

    def _check_host(self, headers: list[tuple[bytes, bytes]]) -> None:
        """Raise APIError, status 421, if a header names another host than this server."""
        for name, value in headers:
            if name == b"host" and self._allowed_hosts is not None:
                given = value.decode("latin-1").lower()
                if re.sub(r":\d*$", "", given) not in self._allowed_hosts:
                    raise APIError(
                        421,
                        f"the header Host is {shown(given)}; without API keys this server answers "
                        f"only to {', '.join(sorted(self._allowed_hosts))}: give it an --api-key",
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

    def _key_digest(self, headers: list[tuple[bytes, bytes]]) -> str:
        """Return a digest of the request's API key, which does not give the key away.

        Every key is compared, each in constant time.
        """
        given = [value for name, value in headers if name == b"x-api-key"]
        for name, value in headers:
            if name == b"authorization":
                scheme, _, token = value.partition(b" ")
                given.append(token.strip() if scheme.lower() == b"bearer" else b"")
        if len(set(given)) == 1:
            matches = [hmac.compare_digest(given[0], key) for key in self._keys]
            if any(matches):
                return hashlib.sha256(given[0]).hexdigest()[:16]
        raise APIError(
            401,
            "the API key is missing or wrong: send the header Authorization: Bearer KEY",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )


async def _drop_body(headers: list[tuple[bytes, bytes]], receive: Receive, length: int) -> None:
    """Read a body of `length` bytes that nobody wants, unless it is huge.

    A client that is still sending when the connection closes never reads the answer. One that sent
    "Expect" reads it before it sends.
    """
    if length > _MAX_DROPPED_BYTES or any(name == b"expect" for name, _ in headers):
        return
    while (await receive()).get("more_body"):
        pass


def _content_length(headers: list[tuple[bytes, bytes]]) -> int | None:
    """Return the length that the headers give, None without one.

    Raises:
        APIError: there are too many headers, or two ways to tell where the body ends.
    """
    if len(headers) > MAX_HEADERS:
        raise APIError(431, f"the request has more than {MAX_HEADERS} headers")
    if sum(len(name) + len(value) for name, value in headers) > MAX_HEAD_BYTES:
        raise APIError(431, f"the request has more than {MAX_HEAD_BYTES} bytes of headers")
    lengths = [value for name, value in headers if name == b"content-length"]
    is_chunked = any(name == b"transfer-encoding" for name, _ in headers)
    if len(lengths) + is_chunked > 1:
        raise APIError(400, "the request gives its length twice: send one Content-Length")
    if not lengths:
        return None
    if not lengths[0].isdigit() or len(lengths[0]) > 18:
        raise APIError(400, "the header Content-Length is no number")
    return int(lengths[0])
