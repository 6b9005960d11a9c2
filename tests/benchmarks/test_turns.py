"""benchmarks/turns.py on a small model."""

from collections.abc import Callable

from benchmarks.turns import converse, nanovllm


def test_later_turns_compute_less(shared_checkpoint: Callable[..., str]) -> None:
    turn = nanovllm(shared_checkpoint(vocab_size=10_001, max_position_embeddings=1024), "auto")
    rows = converse(turn, (200, 30, 8), 3)
    assert [row["prompt"] for row in rows] == [230, 268, 306]
    assert rows[0]["computed"] == 230
    assert all(row["computed"] < 30 + 8 + 64 for row in rows[1:])
    assert all(0 < row["first"] < row["seconds"] for row in rows)
