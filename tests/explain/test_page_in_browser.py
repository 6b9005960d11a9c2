"""The page of `nanovllm explain --html` in Chromium, from a disk: NANOVLLM_BROWSER=1 runs it.

It needs playwright and a Chromium of the system; NANOVLLM_BROWSER may be its path.
"""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("playwright")

from playwright.sync_api import Browser, Page, expect, sync_playwright

from nanovllm import LLM, SamplingParams, demo_model
from nanovllm.apps.explain.explain import page_of, recorded

CHOSEN = os.environ.get("NANOVLLM_BROWSER", "")
pytestmark = pytest.mark.skipif(not CHOSEN, reason="NANOVLLM_BROWSER=1 runs it")
CHROMIUM = CHOSEN if "/" in CHOSEN else shutil.which("chromium")
PROMPTS = ["<img src=x onerror=alert(1)></script>", "What is a block table?", "A KV cache"]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield found
        found.close()


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    llm = LLM(demo_model.MODEL, max_model_len=64, max_num_seqs=2, kvcache_block_size=16)
    with recorded(llm.engine, 4) as story:
        params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
        llm.generate(PROMPTS, params, use_tqdm=False)
    llm.shutdown()
    found = tmp_path_factory.mktemp("page") / "steps.html"
    found.write_text(page_of(story), encoding="utf-8")
    return found


@pytest.fixture(params=["light", "dark"])
def page(browser: Browser, path: Path, request: pytest.FixtureRequest) -> Iterator[Page]:
    """The open page; the test fails if it complains, or asks a server for anything."""
    found = browser.new_page(color_scheme=request.param)
    wrong: list[str] = []
    found.on("console", lambda message: wrong.append(message.text))
    found.on("pageerror", lambda error: wrong.append(str(error)))
    found.on("request", lambda r: None if r.url.startswith("file:") else wrong.append(r.url))
    found.goto(path.as_uri())
    yield found
    found.close()
    assert not wrong


def test_keys_and_buttons_go_through_the_steps(page: Page) -> None:
    label = page.locator("#label")
    expect(label).to_have_text("step 0, 1 of 12")
    page.keyboard.press("ArrowRight")
    expect(label).to_have_text("step 1, 2 of 12")
    page.keyboard.press("End")
    expect(label).to_have_text("step 11, 12 of 12")
    expect(page.get_by_label("Next step")).to_be_disabled()
    page.get_by_label("Previous step").click()
    expect(label).to_have_text("step 10, 11 of 12")
    page.keyboard.press("Home")
    page.get_by_text("Play").click()
    expect(label).to_have_text("step 1, 2 of 12")
    page.get_by_text("Pause").click()
    page.reload()
    expect(label).to_have_text("step 1, 2 of 12")


def test_it_shows_text_as_text_and_why_a_prompt_waits(page: Page) -> None:
    expect(page.locator("#texts")).to_contain_text(PROMPTS[0])
    assert page.locator("#texts img").count() == 0
    expect(page.locator("#notes")).to_contain_text("2 run already, which is max_num_seqs")
    expect(page.locator("#rows article")).to_have_count(2)
    expect(page.locator("#rows tr.chosen")).to_have_count(2)


def test_the_colours_are_those_of_the_scheme(page: Page) -> None:
    colour = page.evaluate("getComputedStyle(document.body).backgroundColor")
    is_dark = page.evaluate("matchMedia('(prefers-color-scheme: dark)').matches")
    assert colour == ("rgb(20, 23, 27)" if is_dark else "rgb(255, 255, 255)")


def test_a_narrow_page_has_nothing_outside(page: Page) -> None:
    """Symptom: the facts and the name of the step lie to the right of a phone's screen."""
    page.set_viewport_size({"width": 320, "height": 640})
    page.get_by_text("The engine").click()
    assert page.evaluate("document.documentElement.scrollWidth") <= 320
