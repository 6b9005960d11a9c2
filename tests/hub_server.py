"""A hub on localhost: the parts of Hugging Face's that a download needs."""

import hashlib
import http.server
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

Repository = dict[str, dict[str, Any]]
"""Its commits by branch in "refs", and in "commits" the files of each by name."""


def repository(commit: str, files: dict[str, str | bytes]) -> Repository:
    """Return a repository with one commit."""
    return {"refs": {"main": commit}, "commits": {commit: files}}


class Hub(http.server.ThreadingHTTPServer):
    """Repositories, and what goes wrong with them."""

    daemon_threads = True

    def __init__(self, repositories: dict[str, Repository]) -> None:
        super().__init__(("127.0.0.1", 0), _Answer)
        self.repositories = repositories
        self.fetched: list[tuple[str, str]] = []
        """Commit and file of each GET."""
        self.gated: set[str] = set()
        """Repositories whose terms the client has not accepted."""
        self.damaged: set[str] = set()
        """Files whose first byte is wrong each time."""
        self.flipped: dict[str, list[int]] = {}
        """By file: which byte of each of the next answers is wrong."""
        self.headers: dict[str, str] = {}
        """Of every answer."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    @contextmanager
    def running(self) -> Iterator["Hub"]:
        thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield self
        self.shutdown()
        thread.join()
        self.server_close()

    def handle_error(self, request: object, client_address: object) -> None:
        """Say nothing of clients that went away."""


def as_bytes(content: str | bytes) -> bytes:
    return content if isinstance(content, bytes) else content.encode()


def is_large(name: str) -> bool:
    """Return whether the hub keeps a file in LFS, and knows its SHA-256."""
    return name.endswith((".safetensors", ".gguf", ".bin"))


def etag(name: str, body: bytes) -> str:
    """Return the checksum by which the hub knows a file."""
    if is_large(name):
        return hashlib.sha256(body).hexdigest()
    return hashlib.sha1(b"blob %d\0%b" % (len(body), body)).hexdigest()


class _Answer(http.server.BaseHTTPRequestHandler):
    server: Hub

    def do_HEAD(self) -> None:
        self.answer(with_body=False)

    def do_GET(self) -> None:
        self.answer(with_body=True)

    def log_message(self, *args: Any) -> None:
        """Keep the test's output clean."""

    def answer(self, with_body: bool) -> None:
        path = self.path.partition("?")[0]
        api = re.fullmatch(r"/api/models/((?:\w+/)?\w+)(?:/(revision|tree)/(\w+))?", path)
        resolve = re.fullmatch(r"/(\w+/\w+)/resolve/(\w+)/(.+)", path)
        if api:
            name, what, revision = api[1], api[2], api[3] or "main"
        elif resolve:
            name, what, revision = resolve[1], "resolve", resolve[2]
        else:
            return self.reply(404, b"")
        found = self.server.repositories.get(name)
        if found is None:
            return self.reply(404, b"", {"X-Error-Code": "RepoNotFound"})
        commit = found["refs"].get(revision, revision)
        files = found["commits"].get(commit)
        if files is None:
            return self.reply(404, b"", {"X-Error-Code": "RevisionNotFound"})
        if not resolve:
            return self.reply(200, json.dumps(self.listing(name, what, commit, files)).encode())
        if name in self.server.gated:
            return self.reply(401, b"", {"X-Error-Code": "GatedRepo"})
        if resolve[3] not in files:
            return self.reply(404, b"", {"X-Error-Code": "EntryNotFound"})
        return self.send_file(resolve[3], commit, as_bytes(files[resolve[3]]), with_body)

    def send_file(self, name: str, commit: str, body: bytes, with_body: bool) -> None:
        headers = {"ETag": f'"{etag(name, body)}"', "X-Repo-Commit": commit}
        if not with_body:
            return self.reply(200, body, headers, with_body=False)
        self.server.fetched.append((commit, name))
        places = [0] if name in self.server.damaged else self.server.flipped.get(name)
        if places:
            wrong = bytearray(body)
            wrong[places.pop(0)] ^= 1
            body = bytes(wrong)
        return self.reply(200, body, headers)

    def listing(self, name: str, what: str, commit: str, files: dict[str, str | bytes]) -> Any:
        if what != "tree":
            siblings = [{"rfilename": path} for path in files]
            return {"id": name, "modelId": name, "sha": commit, "siblings": siblings, "tags": []}
        found = []
        for path, content in files.items():
            body = as_bytes(content)
            entry = {"type": "file", "path": path, "size": len(body), "oid": etag(path, body)}
            if is_large(path):
                entry["lfs"] = {"oid": etag(path, body), "size": len(body), "pointerSize": 130}
            found.append(entry)
        return found

    def reply(
        self,
        status: int,
        body: bytes,
        headers: dict[str, str] | None = None,
        with_body: bool = True,
    ) -> None:
        self.send_response(status)
        for key, value in {**self.server.headers, **(headers or {})}.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if with_body:
            self.wfile.write(body)
