"""What hypothesis draws in the tests of tool calls."""

from typing import Any

from hypothesis import strategies as st


def json_values(
    texts: st.SearchStrategy[str], keys: st.SearchStrategy[str]
) -> st.SearchStrategy[Any]:
    """Return a strategy for what JSON can say, of `texts`, and of objects with `keys`."""
    numbers = st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    return st.recursive(
        st.none() | st.booleans() | numbers | texts,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3),
        max_leaves=8,
    )
