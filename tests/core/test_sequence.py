"""Which token ends a sequence."""

import pytest

from nanovllm import SamplingParams
from nanovllm.core.sequence import Sequence


@pytest.mark.parametrize("min_tokens", [0, 1, 2, 3, 4])
@pytest.mark.parametrize("token", [7, 8])
def test_stop_token_may_be_token_min_tokens(token: int, min_tokens: int) -> None:
    """Token 7 is the end of sequence; drafts and forced tokens come as several at once."""
    params = SamplingParams(max_tokens=9, min_tokens=min_tokens, stop_token_ids=[8])
    seq = Sequence(0, [1, 2], params)
    seq.eos_token_ids, seq.stop_token_ids = frozenset({7}), frozenset({7, 8})
    seq.max_num_tokens = 11
    seq.append([token] * 4)
    assert seq.num_output_tokens == max(1, min_tokens)
    assert seq.output.finish_reason == "stop"
    assert seq.output.stop_reason == (None if token == 7 else 8)
