"""The order of texts with common contexts: each context goes ahead of its other texts."""

from hypothesis import given, strategies as st

from nanovllm.apps.lm_eval.order import Scored, prefix_order

TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=6)
TEXTS = st.lists(
    st.builds(lambda context, rest: Scored(context + rest, len(context)), TOKENS, TOKENS),
    max_size=12,
)


@given(TEXTS, st.integers(1, 20))
def test_each_text_goes_once(texts: list[Scored], lag: int) -> None:
    assert sorted(prefix_order(texts, lag)) == list(range(len(texts)))


def test_the_choices_of_a_question_follow_when_its_context_is_cached() -> None:
    """Four choices a question, ten tokens each, and a step of ten tokens."""
    texts = [
        Scored([question] * 8 + [choice, 9], 8) for question in range(6) for choice in range(4)
    ]
    order = list(prefix_order(texts, lag=20))
    places = {index: place for place, index in enumerate(order)}
    for question in range(4):
        first, *others = sorted(places[4 * question + choice] for choice in range(4))
        between = order[first + 1 : others[0]]
        new = {texts[index].tokens[0] for index in between} - {question}
        assert len(new) >= 2
    assert max(places[index] for index in range(4)) < min(places[20 + i] for i in range(4))


def test_contexts_with_the_same_beginning_are_neighbours() -> None:
    """And what they share counts once: three questions after the same examples are few tokens."""
    examples = list(range(50))
    texts = [
        Scored([*examples, question, choice], 51) for question in range(3) for choice in (7, 8)
    ]
    other = Scored([99, 1, 2], 2)
    assert list(prefix_order([*texts, other], lag=52)) == [0, 2, 4, 6, 1, 3, 5]
