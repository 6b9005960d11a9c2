"""Each family beside transformers' own class: logits, greedy tokens, batching, windows, hits."""

import pytest

from tests.models.comparison import (  # noqa: F401
    check_answers,
    runs,
    saved_models,
    test_logits_of_all_positions,
)
from tests.models.family_cases import CASES, make_model

saved = saved_models(make_model, CASES)


@pytest.mark.thinned(2)
@pytest.mark.parametrize(("saved", "chunk"), runs(CASES, every=2), indirect=["saved"])
def test_greedy_tokens(saved, chunk, make_llm):
    check_answers(saved, chunk, make_llm)
