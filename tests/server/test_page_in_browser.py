"""The page at / in Chromium, with the demo model's answers: NANOVLLM_BROWSER=1 runs it.

It needs playwright and a Chromium of the system; NANOVLLM_BROWSER may be its path. Where an answer
matters, a grammar that is added to the page's request makes the model write it.
"""

import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("playwright")

from playwright.sync_api import Browser, BrowserContext, Page, Route, expect, sync_playwright

from nanovllm import AsyncLLM
from tests.glossary import QUESTION
from tests.server.conftest import Running, running

CHOSEN = os.environ.get("NANOVLLM_BROWSER", "")
pytestmark = pytest.mark.skipif(not CHOSEN, reason="NANOVLLM_BROWSER=1 runs it")
CHROMIUM = CHOSEN if "/" in CHOSEN else shutil.which("chromium")
CHAT = "**/v1/chat/completions"
ANSWER = "article.answer:not(.running)"
HOSTILE = """\
<script>document.title = "hacked"</script>
<img src=x onerror="document.title='hacked'"> text <svg onload="document.title='hacked'"/>

[a](javascript:document.title='hacked') [b](JaVaScRiPt:alert(1)) [c](data:text/html,hi) \
[d](https://example.com "fine") ![e](http://example.com/e.png)

<a href="javascript:document.title='hacked'">f</a><iframe srcdoc="<script>1</script>"></iframe>

```html"><script>document.title="hacked"</script>
<script>document.title = "hacked"</script>
```

<style>body { display: none }</style><form action="/x"><input name="body"></form>"""
FEATURES = """\
# Head

Some *text* with `code`,
a second line, and [a link][1].

1. one
   - inner

2. two

> quote

| a | b |
|---|--:|
| 1 | 2 |

```python
def f(x):
    return "<b>"
```

- [x] done

Term<br>x<sub>2</sub> <div>shown</div>

[1]: https://example.com
"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield found
        found.close()


@pytest.fixture
def context(browser: Browser) -> Iterator[BrowserContext]:
    """What a browser keeps, empty at first."""
    found = browser.new_context(permissions=["clipboard-read", "clipboard-write"])
    found.set_default_timeout(20_000)
    yield found
    found.close()


@pytest.fixture
def page(context: BrowserContext, server: Running) -> Iterator[Page]:
    """The page, whose answers are greedy and short; no script may fail, and no policy be broken."""
    yield from opened(context, server)


def opened(context: BrowserContext, server: Running) -> Iterator[Page]:
    settings = json.dumps({"temperature": 0, "max_tokens": 120})
    context.add_init_script(f"localStorage['nanovllm-settings'] ??= {settings!r}")
    page = context.new_page()
    problems: list[str] = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("dialog", lambda dialog: (problems.append(dialog.message), dialog.dismiss()))
    page.on("console", lambda message: problems.append(message.text) if is_bad(message) else None)
    page.goto(server.url)
    yield page
    assert not problems


def is_bad(message: Any) -> bool:
    return message.type in ("error", "warning") and "Failed to load resource" not in message.text


def say(page: Page, text: str) -> None:
    """Let the model write this text, from the next request on."""
    ask_with(page, {"structured_outputs": {"grammar": f"start: {json.dumps(text)}"}})


def ask_with(page: Page, fields: dict[str, Any]) -> None:
    """Add fields to the page's requests."""
    page.unroute(CHAT)

    def handle(route: Route) -> None:
        route.continue_(post_data=json.dumps({**route.request.post_data_json, **fields}))

    page.route(CHAT, handle)


def send(page: Page, text: str = QUESTION) -> None:
    page.fill("#prompt", text)
    page.keyboard.press("Enter")


def answers(page: Page, count: int) -> None:
    """Wait until so many answers are whole."""
    expect(page.locator(ANSWER)).to_have_count(count, timeout=20_000)
    expect(page.locator("article.running")).to_have_count(0)


def test_a_conversation(page: Page, server: Running) -> None:
    expect(page.locator("#model option")).to_have_text([server.state.model_name])
    expect(page.locator("#welcome")).to_be_visible()
    send(page)
    answers(page, 1)
    note = page.locator("article.answer .note")
    expect(note).to_have_text(re.compile(r"\d+ tokens · [\d.,]+ tokens/s · first after \d+ ms$"))
    first = page.locator(".markdown").inner_text()
    assert len(first) > 40
    page.reload()  # the browser keeps it
    answers(page, 1)
    assert page.locator(".markdown").inner_text() == first

    page.keyboard.press("Control+Shift+Enter")  # greedy, so it is the same again
    expect(page.locator("article.running")).to_have_count(1)
    answers(page, 1)
    assert page.locator(".markdown").inner_text() == first
    send(page, "And what is a block table?")
    answers(page, 2)
    page.locator("#prompt").press("ArrowUp")
    page.locator(".editor textarea").fill("What is\nchunked prefill?")
    page.keyboard.press("Enter")
    answers(page, 2)
    assert page.locator(".bubble").nth(1).inner_text() == "What is\nchunked prefill?"
    assert not page.locator("#toast button").count()  # nothing came after it

    page.locator("article.user").first.hover()
    page.locator("article.user").first.get_by_label("Edit").click()
    page.locator(".editor textarea").fill("Hello")
    page.keyboard.press("Escape")  # leaves the edit
    assert page.locator(".bubble").count() == 2
    page.locator("article.user").first.get_by_label("Edit").click()
    page.keyboard.press("Enter")
    answers(page, 1)
    page.click("#toast button")  # undo
    answers(page, 2)


def test_markdown_and_code(page: Page) -> None:
    say(page, FEATURES)
    page.evaluate("localStorage['nanovllm-settings'] = '{}'")
    page.reload()
    send(page)
    answers(page, 1)
    markdown = page.locator(".markdown")
    for tag in ("h1", "em", "ol > li > ul", "blockquote", "table td", "sub", "br"):
        assert markdown.locator(tag).count(), tag
    assert markdown.locator(".hljs-keyword").all_inner_texts() == ["def", "return"]
    assert "<div>shown</div>" in markdown.inner_text()
    link = markdown.locator("a")
    assert link.get_attribute("href") == "https://example.com"
    assert link.get_attribute("rel") == "noopener noreferrer nofollow"
    page.click(".codeblock button")
    expect(page.locator(".codeblock button")).to_have_text("Copied")
    assert page.evaluate("navigator.clipboard.readText()") == 'def f(x):\n    return "<b>"'
    page.get_by_label("Copy", exact=True).last.click()
    assert page.evaluate("navigator.clipboard.readText()") == FEATURES


def test_hostile_answers_are_text(page: Page) -> None:
    say(page, HOSTILE)
    page.evaluate("localStorage['nanovllm-settings'] = '{}'")
    page.reload()
    send(page, '<img src=x onerror="document.title=1">')
    answers(page, 1)
    shown = page.locator("#messages")
    assert shown.locator("script, img, svg, iframe, style, input, textarea").count() == 0
    links = [link.get_attribute("href") for link in shown.locator("a").all()]
    assert {link for link in links if link} == {"https://example.com", "http://example.com/e.png"}
    assert "<img src=x onerror=\"document.title='hacked'\">" in shown.inner_text()
    assert "hacked" not in page.title()
    names = page.evaluate(
        "[...document.querySelectorAll('*')].flatMap((e) => e.getAttributeNames())"
    )
    assert not [name for name in names if name.startswith("on")]


@pytest.mark.parametrize(
    "html",
    [
        "<img src=x onerror=alert(1)>",
        "<svg><animate onbegin=alert(1) attributeName=x dur=1s>",
        "<math><mtext><table><mglyph><style><img src=x onerror=alert(1)>",
        "<a href='jav&#x09;ascript:alert(1)'>x</a>",
        "<form id=body><input name=attributes></form>",
        "<p style='background:url(//example.com)' id=prompt class=sr>x</p>",
    ],
)
def test_the_sanitizer_alone_lets_nothing_through(
    context: BrowserContext, server: Running, html: str
) -> None:
    """It is the second of three fences: HTML is text before it, and the policy stands behind."""
    page = context.new_page()
    page.goto(server.url)
    made = page.evaluate(
        """async (html) => {
            const { clean } = await import("./page/markdown.js");
            const box = document.createElement("div");
            box.append(clean(html));
            return box.innerHTML;
        }""",
        html,
    )
    assert not re.search(r"alert|<(img|svg|math|style|form|input)|style=|id=|//", made)


def test_text_that_grows_ends_as_if_it_came_at_once(page: Page) -> None:
    texts = [FEATURES, HOSTILE, FEATURES.replace("\n", "\r\n"), "- a\n\n  b\n\n\n- c\n\nd\n    e"]
    results = page.evaluate(
        """async (texts) => {
            const { MarkdownView } = await import("./page/markdown.js");
            return texts.map((text) => [1, 3, text.length].map((step) => {
                const box = document.createElement("div"), view = new MarkdownView(box);
                for (let end = step; end < text.length; end += step) {
                    view.update(text.slice(0, end));
                }
                view.finish(text);
                return box.innerHTML.replaceAll(/\\s+/g, " ");
            }));
        }""",
        texts,
    )
    for slow, faster, at_once in results:
        assert slow == faster == at_once


def test_rename_delete_export_and_import(page: Page, tmp_path: Path) -> None:
    send(page)
    answers(page, 1)
    item = page.locator("#list li")
    item.hover()
    item.get_by_label("Rename").click()
    page.get_by_label("Title").fill("Größe & <b>“KV”</b> 漢字")
    page.keyboard.press("Enter")
    expect(page.locator("#list a")).to_have_text("Größe & <b>“KV”</b> 漢字")
    with page.expect_download() as download:
        page.click("#export")
    path = tmp_path / "conversations.json"
    download.value.save_as(path)
    item.hover()
    item.get_by_label("Delete").click()
    expect(item).to_have_count(0)
    expect(page.locator("#welcome")).to_be_visible()
    page.click("#toast button")
    expect(item).to_have_count(1)
    page.set_input_files("#file", path)
    expect(page.locator("#toast")).to_have_text("0 conversations were imported.")
    item.hover()
    item.get_by_label("Delete").click()
    page.set_input_files("#file", path)
    expect(page.locator("#list a")).to_have_text("Größe & <b>“KV”</b> 漢字")
    page.fill("#search", "漢字")
    expect(item).to_have_count(1)
    page.fill("#search", "nothing has this")
    expect(item).to_have_count(0)


def test_errors_are_shown_and_can_be_tried_again(page: Page) -> None:
    page.route(CHAT, lambda route: route.abort())
    send(page)
    expect(page.get_by_role("alert").first).to_contain_text("The server cannot be reached")
    page.unroute(CHAT)
    page.get_by_role("button", name="Try again").click()
    answers(page, 1)
    expect(page.locator(".failure")).to_have_count(0)
    send(page, "word " * 3000)  # too long for the model
    expect(page.locator(".failure")).to_contain_text("1024")
    page.get_by_role("button", name="Try again").click()
    expect(page.locator(".failure")).to_contain_text("1024")


def test_settings(page: Page) -> None:
    page.keyboard.press("Control+,")
    page.get_by_label("Temperature").fill("-3")
    page.get_by_role("button", name="Save").click()
    expect(page.locator("#settings-error")).to_contain_text("Temperature: ")
    page.get_by_label("Temperature").fill("0.5")
    page.get_by_label("Seed").fill("7")
    page.get_by_label("System prompt").fill("Be brief.")
    page.get_by_label("Most tokens").fill("9")
    page.get_by_role("button", name="Save").click()
    with page.expect_request(CHAT) as request:
        send(page)
    answers(page, 1)
    sent = request.value.post_data_json
    assert (sent["temperature"], sent["seed"], sent["max_tokens"]) == (0.5, 7, 9)
    assert sent["messages"][0] == {"role": "system", "content": "Be brief."}
    assert "top_p" not in sent
    expect(page.locator("article.answer .note")).to_contain_text("the most tokens")


def test_tool_calls_and_their_results(page: Page) -> None:
    city = {"type": "object", "properties": {"city": {"enum": ["Rome"]}}, "required": ["city"]}
    tool = {"type": "function", "function": {"name": "weather", "parameters": city}}
    page.click("#settings")
    page.get_by_text("Tools").click()
    page.locator("[name=tools]").fill("[{}")
    page.get_by_role("button", name="Save").click()
    expect(page.locator("#settings-error")).to_contain_text("not JSON")
    page.locator("[name=tools]").fill(json.dumps([tool]))
    page.locator("[name=tool_choice]").select_option("required")
    page.get_by_role("button", name="Save").click()
    ask_with(page, {"parallel_tool_calls": False})
    send(page, "The weather in Rome?")
    answers(page, 1)
    expect(page.locator(".call summary")).to_have_text("Call of weather")
    expect(page.locator(".call pre")).to_have_text('{ "city": "Rome" }')
    ask_with(page, {"tool_choice": "none"})
    page.get_by_label("Result of weather").fill("31 °C, sunny")
    page.get_by_role("button", name="Send results").click()
    answers(page, 2)
    assert page.locator(".failure").count() == 0
    assert page.locator(".tool pre").text_content() == "31 °C, sunny"


def test_the_key_is_asked_for(context: BrowserContext, async_llm: AsyncLLM) -> None:
    with running(async_llm, api_keys=("the-key",)) as server:
        for page in opened(context, server):
            for key in ("wrong", "the-key"):
                page.get_by_label("Key", exact=True).fill(key)
                page.keyboard.press("Enter")
            expect(page.locator("#model option")).to_have_count(1)
            send(page)
            answers(page, 1)
            assert "the-key" not in page.evaluate("JSON.stringify(localStorage)")
