"""The site: the pictures are today's, its links are checked, and a browser asks no other host."""

import functools
import os
import shutil
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import pytest

from tests.helpers import ROOT
from tools import plots
from tools.site import links

CHOSEN = os.environ.get("NANOVLLM_BROWSER", "")
READ = ["index", "install", "server", "beside", "configuration", "course/04_blocks/index"]
READ += ["architecture", "performance", "explain", "api/options", "source/nanovllm/llm.py"]


def test_the_pictures_are_those_of_the_data():
    for name, picture in plots.pictures().items():
        assert (ROOT / f"docs/pictures/{name}.svg").read_text("utf-8") == picture, (
            f"{name}.svg: run python -m tools.plots"
        )


def test_every_page_has_a_place_in_the_index():
    """Sphinx refuses a page without one, and the site is built by hand."""
    listed = (ROOT / "tools/site/pages/index.md").read_text("utf-8").split()
    assert [page.stem for page in (ROOT / "docs").glob("*.md") if page.stem not in listed] == []


def test_faults_of_links_are_found(tmp_path):
    (tmp_path / "there.html").write_text('<h2 id="here">Here</h2>')
    (tmp_path / "page.html").write_text(
        '<a href="there.html#here">a</a> <a href="https://example.com">b</a>'
        '<a href="gone.html">c</a> <a href="there.html#nowhere">d</a>'
        '<script src="https://example.com/a.js"></script>'
    )
    (tmp_path / "style.css").write_text("@import url(//example.com/a.css)")
    assert links.check(tmp_path) == [
        "page.html: gone.html does not exist",
        "page.html: https://example.com/a.js is on another host",
        "page.html: there.html#nowhere has no such heading",
        "style.css fetches from another place",
    ]


@pytest.mark.skipif(not CHOSEN, reason="NANOVLLM_BROWSER=1 runs it, with the extra site and npm")
def test_a_browser_reads_the_site(tmp_path):
    from playwright.sync_api import sync_playwright

    from tools.site.__main__ import build

    assert build(tmp_path) == 0

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=tmp_path))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    home = f"http://127.0.0.1:{server.server_port}/"
    chromium = CHOSEN if "/" in CHOSEN else shutil.which("chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 360, "height": 800})
        asked: list[str] = []
        problems: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        page.on("pageerror", lambda error: problems.append(str(error)))
        for name in READ:
            page.goto(f"{home}{name}.html", wait_until="networkidle")
            assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), name
        page.set_viewport_size({"width": 1280, "height": 800})
        page.goto(f"{home}run.html")
        page.click("header a")
        assert page.url == f"{home}explain.html"
        page.evaluate("document.querySelector('pre').textContent = 'x'.repeat(100)")
        page.add_style_tag(content="pre { white-space: pre !important }")
        assert page.evaluate("(e => e.scrollWidth <= e.clientWidth)(document.querySelector('pre'))")
        page.goto(f"{home}architecture.html")
        page.wait_for_selector('.diagram svg[aria-label="Diagram: The way of a request"]')
        page.goto(f"{home}search.html?q=how+do+I+serve+two+models")
        assert "Several models" in page.inner_text("#results > li:first-child")
        browser.close()
    server.shutdown()
    assert problems == []
    assert [url for url in asked if not url.startswith((home, "data:"))] == []
