"""The pages' files: what they refer to, their headers, and that they need no key."""

import hashlib
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from nanovllm import AsyncLLM
from nanovllm.apps.server import pages
from tests.helpers import ROOT
from tests.server.conftest import Running, running
from tools.page_vendor import PACKAGES, VENDOR

FOLDER = ROOT / "nanovllm/apps/server/page"
OWN = sorted(path for path in FOLDER.iterdir() if path.is_file())
SCRIPTS = {path.name: path.read_text() for path in OWN if path.suffix == ".js"}
STORED = {"localStorage": {"store.js", "theme.js"}, "sessionStorage": {"api.js"}}
"""Which files may keep something in the browser; the key is in api.js."""


class Page(HTMLParser):
    """Reads what a page refers to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.inside: list[str] = []
        self.unlabelled: list[str | None] = []
        self.scripts = ""
        self.feed(text)
        self.ids = {attributes.get("id") for _, attributes in self.tags}
        labels = {attributes.get("for") for tag, attributes in self.tags if tag == "label"}
        self.unlabelled = [each for each in self.unlabelled if each not in labels]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = dict(attrs)
        self.tags.append((tag, attributes))
        is_field = tag in ("input", "textarea", "select")
        if is_field and "label" not in self.inside and "aria-label" not in attributes:
            self.unlabelled.append(attributes.get("id"))
        if tag not in ("input", "img", "meta", "link"):
            self.inside.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.inside.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.inside[-1:] in (["script"], ["style"]):
            self.scripts += data


def test_the_page_refers_to_files_of_its_own(server: Running) -> None:
    reply = server.send("/")
    assert reply.headers["content-type"] == "text/html; charset=utf-8"
    head = server.send("/", method="HEAD")
    assert (head.status, head.body) == (200, "")
    assert head.headers["etag"] == reply.headers["etag"]
    found = Page(reply.body)
    assert not found.scripts, "code in the page"
    for tag, attributes in found.tags:
        assert not attributes.keys() & {"action", "srcdoc", "style"}, tag
        assert not any(name.startswith("on") for name in attributes), "code in an attribute"
        assert tag not in ("iframe", "object", "embed", "base", "style")
        for name in ("src", "href"):
            if (value := attributes.get(name)) and not value.startswith(("#", "./")):
                assert server.send(f"/{value}").status == 200
    assert ("html", {"lang": "en"}) in found.tags


@pytest.mark.parametrize("path", OWN, ids=lambda path: path.name)
def test_a_file_refers_to_nothing_outside(server: Running, path: Path) -> None:
    text = path.read_text(encoding="utf-8").replace('xmlns="http://www.w3.org/2000/svg"', "")
    assert not re.search(r"\w+://|\bdata:\w", text)
    for name in re.findall(r"""(?:\bfrom |url\()["']([^"']+)["']""", text):
        assert server.send(f"/page/{name.removeprefix('./')}").status == 200
    assert not re.search(r"@import|\bimport\(|importScripts|\beval\(|\bFunction\(", text)


def test_text_is_made_html_only_by_the_sanitizer() -> None:
    for name, text in SCRIPTS.items():
        assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|srcdoc", text)
        assert not re.search(r"DOMParser|createContextualFragment|setHTML|trustedTypes", text)
        assert ("DOMPurify" in text) == (name == "markdown.js")


@pytest.mark.parametrize("place", STORED)
def test_what_the_browser_keeps(place: str) -> None:
    assert {name for name, text in SCRIPTS.items() if f"{place}." in text} == STORED[place]
    assert not any("cookie" in text for text in SCRIPTS.values())


@pytest.mark.parametrize(
    ("path", "selector"),
    [("server/page/chat.css", "main"), ("server/page/chat.css", "body.chat"),
     ("explain/page/style.css", "dl")],
)  # fmt: skip
def test_a_column_that_holds_any_text_is_no_wider_than_the_screen(path: str, selector: str) -> None:
    """A plain column is as wide as its longest word: on a phone, a model's name moves Send outside.

    Without a browser there is no layout to look at; test_page_in_browser.py has one.
    """
    css = (ROOT / "nanovllm/apps" / path).read_text()
    [rule] = re.findall(rf"^{re.escape(selector)} \{{ display: grid;([^}}]*)\}}", css, re.MULTILINE)
    assert re.search(r"grid-template(-columns)?:[^;]* minmax\(0, 1fr\);", rule)


def test_the_policy_allows_the_files_and_nothing_else(server: Running) -> None:
    headers = server.send("/").headers
    policy = dict(rule.split(" ", 1) for rule in headers["content-security-policy"].split("; "))
    for rule in ("default-src", "base-uri", "form-action", "frame-ancestors"):
        assert policy[rule] == "'none'"
    for rule in ("script-src", "style-src", "connect-src"):
        assert policy[rule] == "'self'"
    assert policy["img-src"] == "'self' data:"  # pictures of the user's
    assert policy["require-trusted-types-for"] == "'script'"
    assert policy["trusted-types"] == "dompurify"
    assert headers["x-content-type-options"] == "nosniff"


def test_every_field_has_a_label_and_every_id_exists() -> None:
    found = Page((FOLDER / "index.html").read_text())
    assert not found.unlabelled
    for _, attributes in found.tags:
        for attribute in ("aria-labelledby", "aria-describedby", "aria-controls"):
            assert attributes.get(attribute) in {None, *found.ids}
    text = "".join(SCRIPTS.values())
    used = set(re.findall(r"""(?:byId|getElementById)\("([\w-]+)"\)""", text))
    assert used <= found.ids
    styles = (FOLDER / "style.css").read_text()
    icons = {attributes.get("data-icon") for _, attributes in found.tags} - {None}
    assert all(f'[data-icon="{icon}"]' in styles for icon in icons)


def test_files_are_sent_again_only_if_they_changed(server: Running) -> None:
    first = server.send("/page/app.js")
    assert first.body == SCRIPTS["app.js"]
    assert first.headers["content-type"] == "text/javascript; charset=utf-8"
    again = server.send("/page/app.js", If_None_Match=first.headers["etag"])
    assert (again.status, again.body) == (304, "")
    assert server.send("/page/app.js", If_None_Match='"other"').body == first.body


@pytest.mark.parametrize("prefix", ["", "/llm"])
def test_the_pages_need_no_key_and_their_data_does(async_llm: AsyncLLM, prefix: str) -> None:
    with running(async_llm, api_keys=("the-key",), root_path="/llm") as server:
        for path in ("/", "/page/app.js", "/page/vendor/purify.js"):
            reply = server.send(prefix + path)
            assert reply.status == 200
            assert "the-key" not in reply.body
        for path in ("/metrics", "/v1/models"):
            assert server.send(prefix + path).status == 401
        for path in ("../pages.py", "%2e%2e/pages.py", "vendor/../../pages.py", "", "/etc/passwd"):
            assert server.send(f"{prefix}/page/{path}").status == 401
            key = {"Authorization": "Bearer the-key"}
            assert server.send(f"{prefix}/page/{path}", **key).status == 404


def test_libraries_are_those_that_are_pinned() -> None:
    pinned = {file.name: file.sha256 for files in PACKAGES.values() for file in files}
    found = {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in VENDOR.iterdir()}
    assert found == pinned
    assert all(f"/page/vendor/{name}" in pages.PATHS for name in pinned if name.endswith(".js"))
