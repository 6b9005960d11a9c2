"""benchmarks.limit counts what the engine's steps must read and compute."""

import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from benchmarks import limit, rates
from benchmarks.rates import Rates
from benchmarks.versus import CASES, GREEDY, Case
from nanovllm.core.messages import Row
from nanovllm.kernels.cpu import library

pytestmark = pytest.mark.skipif(library.library() is None, reason="no compiler here")


def row(first: int, count: int, samples: bool) -> Row:
    return Row(0, 0, first, count, samples)


def test_work_of_a_step(make_llm: Any, shared_checkpoint: Callable[..., str]) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 32}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    model = shared_checkpoint(vocab_size=512, **sizes, **heads)
    llm = make_llm(model, max_model_len=256, dtype="bfloat16")
    steps = limit.Steps(limit.network_of(llm))
    layer = 64 * (8 * 32) + 4 * 32 * 64 + 64 * 2 * 96 + 96 * 64
    head = 512 * 64
    # A prompt's part of 3 tokens after 4, which sees 5, 6 and 7; and a token that sees 10.
    found = steps.work([row(4, 3, False), row(9, 1, True)])
    products = 2 * (2 * layer * 4 + head)
    attention = 2 * 2 * 4 * 32 * (5 + 6 + 7 + 10) * 2
    assert found.operations == Counter({16: products + attention})
    kv = 2 * (7 + 10) * 2 * 2 * 32 * 2
    assert found.nbytes == 2 * (2 * layer + head) + kv
    # Without a token that samples, nobody reads the head.
    assert steps.work([row(0, 1, False)]).nbytes == 2 * 2 * layer + 2 * 2 * 2 * 32 * 2


def test_experts_and_windows() -> None:
    of_experts = limit.Matrices(16, 800, 1600, experts=(8, 2))
    one = of_experts.add(limit.Work(0.0, Counter()), 1, 1)
    assert (one.nbytes, one.operations[16]) == (400, 400)
    two = of_experts.add(limit.Work(0.0, Counter()), 2, 1)
    assert (two.nbytes, two.operations[16]) == (1600 * (1 - 0.75**2), 800)


def test_parts_of_a_case() -> None:
    prompts = [limit.Step([row(0, 9, False)], 1.0), limit.Step([row(9, 3, True)], 4.0)]
    rest = [limit.Step([row(place, 1, True)], 6.0 + place) for place in (12, 13)]
    assert limit.parts_of("decode1", prompts + rest, 0.5, 22.0) == {
        "decode1": (prompts + rest, 21.5)
    }
    assert limit.parts_of("prefill4k", prompts, 0.5, 7.0) == {"prefill4k": (prompts, 6.5)}
    assert limit.parts_of("decode16k", prompts + rest, 0.5, 22.0) == {
        "decode16k, prompts": (prompts, 17.5),
        "decode16k, rest": (rest, 4.0),
    }


def test_limit_is_the_longer_time() -> None:
    found = Rates(10.0, {"float32": 8.0, "int8": 20.0})
    assert (found.multiplying(16), found.multiplying(4)) == (8.0, 20.0)
    work = limit.Work(40.0, Counter({16: 8, 4: 40}))
    assert (work.reading(found), work.computing(found), work.limit(found)) == (4.0, 3.0, 4.0)
    other = Rates(5.0, {"float32": 9.0, "int8": 1.0})
    assert found.best(other) == Rates(10.0, {"float32": 9.0, "int8": 20.0})


def test_command(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    shared_checkpoint: Callable[..., str],
) -> None:
    monkeypatch.setitem(CASES, "decode1", Case(2, (40, 40), (4, 4), GREEDY))
    monkeypatch.setattr(rates, "BUFFER_BYTES", 2**20)
    monkeypatch.setattr(limit, "BUFFER_BYTES", 2**20)
    model = shared_checkpoint(vocab_size=10_001, max_position_embeddings=1024)
    arguments = ["--model", model, "--cases", "decode1", "--rounds", "2"]
    monkeypatch.setattr(sys, "argv", ["limit.py", *arguments])
    limit.main()
    *_, line = capsys.readouterr().out.splitlines()
    name, seconds, least, share, *_ = line.strip("| ").split(" | ")
    assert name == "decode1"
    assert 0 < float(least) < float(seconds)
    assert 0 < float(share.removesuffix("%")) < 100
