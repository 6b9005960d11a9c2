"""A failing comparison says where the tensors differ."""

import pytest
import torch

from tests.closeness import assert_close, token_names


def failure(found, expected, **options) -> str:
    with pytest.raises(AssertionError) as caught:
        assert_close(found, expected, **options)
    return str(caught.value)


def test_close_tensors_pass():
    x = torch.randn(5, 3, 7)
    assert_close(x, x)
    assert_close(x.bfloat16(), x.double(), rtol=2**-8)
    assert_close(x + 0.5 * x.abs().max(), x, of_largest=0.51)
    assert_close(x + 1, x, atol=torch.full((3, 1), 1.01))
    assert_close(torch.empty(0, 3), torch.empty(0, 3))
    assert_close(torch.tensor([-torch.inf, 1.0]), torch.tensor([-torch.inf, 1.01]), of_largest=0.1)


@pytest.mark.parametrize("variant", ["avx2"])
def test_the_message_names_the_worst_number_and_all_wrong_indices(variant):
    expected = torch.zeros(6, 4, 8)
    found = expected.clone()
    found[2:5, 1, 3] = 0.5
    found[4, 1, 3] = 2
    rows = token_names([4, 2], [4, 9])
    assert failure(found, expected, atol=0.25, rows=rows).splitlines() == [
        "2 apart where 0.25 is allowed, in "
        f"test_closeness.py::test_the_message_names_the_worst_number_and_all_wrong_indices[{variant}]",
        "worst: token 4 (row 1, position 7 of 9), head 1, number 3: 2, not 0",
        "wrong in 3 of 6 tokens: 2-4",
        "right: row 0, position 0 of 4; row 0, position 1 of 4; row 1, position 8 of 9",
        "wrong in 1 of 4 heads: 1",
        "wrong in 1 of 8 numbers: 3",
    ]


def test_nan_is_never_close():
    expected = torch.ones(3, 2)
    found = expected.clone()
    found[1] = torch.nan
    found[0, 0] = 7
    message = failure(found, expected, atol=1e9)
    assert "worst: row 1, number 0: nan, not 1" in message
    assert "wrong in 1 of 3 rows: 1" in message
    assert "nan" in failure(expected, found, atol=1e9)
    found[1] = -torch.inf
    assert "worst: row 1, number 0: 1, not -inf" in failure(expected, found, of_largest=1.0)


def test_other_shapes_and_dtypes_are_not_close():
    assert failure(torch.ones(3), torch.ones(3, 1)) == "shape [3], not [3, 1]"
    assert failure(torch.ones(3).half(), torch.ones(3)) == "torch.float16, not torch.float32"
