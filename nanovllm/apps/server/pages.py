"""GET /, a page to talk to, and its files below /page/.

They are files without data: they ask the other routes, with the API key that their user types. They
load nothing from elsewhere, and the browser is told to refuse anything else.
"""

from functools import cache
from hashlib import sha256
from pathlib import Path

from fastapi import APIRouter, HTTPException, Request
from starlette.responses import Response

from nanovllm.apps.server.error_bodies import route_path

router = APIRouter(include_in_schema=False)

_FOLDER = Path(__file__).parent / "page"
_METHODS = ["GET", "HEAD"]  # agents ask with HEAD whether a server is there
_MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_FILES = {
    f"/page/{path.relative_to(_FOLDER).as_posix()}": path
    for path in _FOLDER.rglob("*")
    if path.suffix in _MEDIA_TYPES
} | {"/": _FOLDER / "index.html"}
PATHS = frozenset(_FILES)
FILE_ROUTE = "/page/{name:path}"
_POLICY = {
    "default-src": "'none'",
    "script-src": "'self'",
    "style-src": "'self'",
    "img-src": "'self' data:",  # pictures of the user's
    "connect-src": "'self'",
    "base-uri": "'none'",
    "form-action": "'none'",
    "frame-ancestors": "'none'",
    "require-trusted-types-for": "'script'",  # no text becomes HTML ...
    "trusted-types": "dompurify",  # ... but by the sanitizer
}
_HEADERS = {
    "Content-Security-Policy": "; ".join(f"{rule} {value}" for rule, value in _POLICY.items()),
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",  # ask each time whether the ETag still holds
}


@cache
def _file(path: Path) -> tuple[bytes, str]:
    data = path.read_bytes()
    return data, f'"{sha256(data).hexdigest()[:32]}"'


@router.api_route("/", methods=_METHODS)
@router.api_route(FILE_ROUTE, methods=_METHODS)
async def page_file(request: Request) -> Response:
    path = _FILES.get(route_path(request.scope))
    if path is None:
        raise HTTPException(404)
    data, etag = _file(path)
    headers = {**_HEADERS, "ETag": etag}
    if request.headers.get("if-none-match") == etag:
        return Response(status_code=304, headers=headers)
    return Response(data, media_type=_MEDIA_TYPES[path.suffix], headers=headers)
