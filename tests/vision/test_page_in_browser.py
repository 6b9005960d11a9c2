"""Pictures on the page at /, in Chromium: NANOVLLM_BROWSER=1 runs it."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("playwright")

from playwright.sync_api import expect, sync_playwright

from nanovllm import AsyncLLM
from tests.server.conftest import running
from tests.vision.conftest import FEW
from tests.vision.pictures import noise

CHOSEN = os.environ.get("NANOVLLM_BROWSER", "")
pytestmark = pytest.mark.skipif(not CHOSEN, reason="NANOVLLM_BROWSER=1 runs it")
CHROMIUM = CHOSEN if "/" in CHOSEN else shutil.which("chromium")


def test_a_picture_is_chosen_sent_and_shown(qwen: Callable[[str], Path], tmp_path: Path) -> None:
    noise(60, 90).save(tmp_path / "a.png")
    noise(60, 90, 1).save(tmp_path / "b.png")
    llm = AsyncLLM(str(qwen("qwen3_vl")), dtype="bfloat16", **FEW)
    with running(llm) as server, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 375, "height": 700})
        errors: list[str] = []
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("console", lambda each: errors.append(each.text) if each.type == "error" else None)
        page.goto(server.url)
        expect(page.get_by_role("button", name="Add a picture")).to_be_visible()
        page.set_input_files("#picture-file", [tmp_path / "a.png", tmp_path / "b.png"])
        expect(page.locator("#waiting img")).to_have_count(2)
        page.get_by_role("button", name="Remove picture 2").click()
        expect(page.locator("#waiting img")).to_have_count(1)
        page.fill("#prompt", "What is it?")
        with page.expect_request("**/v1/chat/completions") as sent:
            page.get_by_role("button", name="Send").click()
        content = json.loads(sent.value.post_data or "")["messages"][-1]["content"]
        assert [part["type"] for part in content] == ["image_url", "text"]
        expect(page.locator("article.answer:not(.running)")).to_have_count(1)
        expect(page.locator("article.user img")).to_have_count(1)
        expect(page.locator("#waiting img")).to_have_count(0)
        page.reload()
        expect(page.locator("article.user img")).to_have_count(1)
        width = "document.documentElement.scrollWidth"
        assert page.evaluate(width) <= 375
        assert not errors
        browser.close()
    llm.shutdown()
