"""The page of docs/exactness.md, whose tables are made of results."""

from tools import exactness


def test_page_is_current() -> None:
    text = exactness.PAGE.read_text("utf-8")
    assert exactness.page() == text, "run python -m tools.exactness"
    assert [mark for _, mark, _ in exactness.PART.findall(text)] == list(exactness.PARTS)
