"""The registry, and the page that is made of it."""

from tools import made_tables, models


def test_page_of_models_is_current() -> None:
    text = models.PAGE.read_text("utf-8")
    assert models.page() == text, "run python -m tools.models"
    assert [mark for _, mark, _ in made_tables.PART.findall(text)] == list(models.PARTS)
