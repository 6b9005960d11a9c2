"""Marked tokens in the text."""

import pytest
from hypothesis import given, settings, strategies as st

from nanovllm.engine.detokenizer import Detokenizer
from nanovllm.engine.marked_detokenizer import MarkedDetokenizer
from nanovllm.options.sampling_params import TOKEN_MARK
from tests.engine.test_detokenizer import MAKERS, outputs


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_marks_stand_before_marked_tokens_only(kind: str, data: st.DataObject) -> None:
    """Without them the text is that of a Detokenizer, whether tokens come at once or not."""
    tokenizer = MAKERS[kind]()
    special = sorted(tokenizer.get_added_tokens_decoder())
    token_ids = data.draw(outputs(kind))
    for token_id in data.draw(st.lists(st.sampled_from(special), max_size=4)):
        token_ids.insert(data.draw(st.integers(0, len(token_ids))), token_id)
    marked = frozenset(special[:2])
    plain = Detokenizer(tokenizer, skip_special_tokens=False)
    one_by_one, at_once = (
        MarkedDetokenizer(tokenizer, marked, skip_special_tokens=False) for _ in range(2)
    )
    for token_id in token_ids:
        plain.add(token_id)
        one_by_one.add(token_id)
    at_once.add_all(token_ids)
    for detokenizer in (plain, one_by_one, at_once):
        detokenizer.finish()
    assert one_by_one.text == at_once.text
    assert one_by_one.text.replace(TOKEN_MARK, "") == plain.text
    assert one_by_one.text.count(TOKEN_MARK) == sum(i in marked for i in token_ids)


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_may_be_a_marked_token(include: bool) -> None:
    tokenizer = MAKERS["byte_level"]()
    token_id = tokenizer.token_to_id("<|im_end|>")
    ids = [*tokenizer.encode("<|im").ids, token_id, *tokenizer.encode("a").ids]
    detokenizer = MarkedDetokenizer(
        tokenizer,
        frozenset({token_id}),
        skip_special_tokens=False,
        stop=["<|im_end|>"],
        include_stop=include,
    )
    assert any(detokenizer.add(token) for token in ids)
    assert detokenizer.text == f"<|im{TOKEN_MARK}{'<|im_end|>' if include else ''}"
