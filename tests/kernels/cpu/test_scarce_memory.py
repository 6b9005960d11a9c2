"""Kernels whose scratch memory the system refuses: an error for the caller, and nothing worse."""

import ctypes
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from nanovllm import SamplingParams, demo_model
from nanovllm.errors import OutOfMemoryError
from nanovllm.features.quantization.integer import quantize
from nanovllm.kernels import torch_experts
from nanovllm.kernels.cpu import build, library as library_module, ops
from nanovllm.kernels.cpu.calls import SOURCES
from nanovllm.kernels.cpu.library import torch_on_one_thread
from nanovllm.kernels.torch_experts import ExpertChoice, ExpertLinear, ExpertMLP
from tests.kernels.cpu.helpers import native, pack, randn

pytestmark = [native]
REFUSING = Path(__file__).with_name("refusing.h")
COMPILED = ("-Og", "-w", "-include", str(REFUSING), f"-DHEADER={zlib.crc32(REFUSING.read_bytes())}")
"""The checksum gives each version of the header its own key in the kernels' cache."""

Refuse = Callable[[int], None]


@pytest.fixture
def refuse_after(monkeypatch: pytest.MonkeyPatch) -> Refuse:
    """Return a function that lets `n` allocations of the kernels succeed and refuses the next."""
    built = build.load(build.NATIVE, *COMPILED)
    monkeypatch.setattr(library_module, "library", lambda: built)
    counter = ctypes.c_int.in_dll(built, "allocations_before_refusal")

    def refuse(n: int) -> None:
        counter.value = n

    refuse(-1)
    return refuse


def linear(weight: torch.Tensor | object) -> Callable[[], torch.Tensor]:
    method = pack(weight)
    x = randn(70, 96)
    return lambda: method.apply(x)


def experts(bits: int) -> Callable[[], torch.Tensor]:
    weights = randn(4 * 128, 64, seed=1), randn(4 * 64, 64, seed=2)
    up, down = (
        ExpertLinear(pack(weight if bits == 16 else quantize(weight, bits, 32)), None, n)
        for weight, n in zip(weights, (128, 64), strict=True)
    )
    mlp = ExpertMLP(up, down, "silu", False)
    x = randn(40, 64)
    routing = torch_experts.route(randn(40, 4, seed=3), ExpertChoice(2, renormalize=True))
    return lambda: ops.experts(x, routing, mlp)


def route() -> Callable[[], torch.Tensor]:
    logits = randn(40, 4, seed=3)
    return lambda: ops.route(logits, ExpertChoice(2, renormalize=True)).weights


def attention(keys: int = 70) -> Callable[[], torch.Tensor]:
    queries = randn(70, 4, 64)
    blocks = torch.arange(-(-keys // 64), dtype=torch.int32)[None]
    cache = randn(2, blocks.numel(), 2, 64, 64, seed=1)
    starts = torch.tensor([0, 70], dtype=torch.int32)
    lens = torch.tensor([keys], dtype=torch.int32)
    return lambda: ops.attention(queries, cache, blocks, starts, lens, scale=0.125)


CALLS: dict[str, tuple[int, Callable[[], Callable[[], torch.Tensor]]]] = {
    "linear": (2, lambda: linear(randn(70, 96, seed=1))),
    "8 bits": (1, lambda: linear(quantize(randn(70, 96, seed=1), 8, 32))),
    "4 bits": (1, lambda: linear(quantize(randn(70, 96, seed=1), 4, 32))),
    "attention": (2, attention),
    "route": (1, route),
    "experts": (11, lambda: experts(16)),
    "experts, 8 bits": (11, lambda: experts(8)),
}
"""By name: at least how many allocations a thread makes, and a function that makes the call."""


@pytest.mark.usefixtures("inference_mode")
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("threads", [1, 3])
def test_each_refused_allocation_is_an_error_and_the_next_call_is_right(
    name: str, threads: int, refuse_after: Refuse
) -> None:
    """Symptom: the process is aborted, or a thread waits for ever for the one without memory."""
    least, make = CALLS[name]
    call = make()
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with torch_on_one_thread():
            expected = call()
            for allocation in range(least):
                refuse_after(allocation)
                with pytest.raises(OutOfMemoryError, match=r"refuses \d+ bytes of memory to a CPU"):
                    call()
                refuse_after(-1)
                assert torch.equal(call(), expected), f"after allocation {allocation} was refused"
    finally:
        torch.set_num_threads(before)


@pytest.mark.usefixtures("inference_mode")
def test_refused_memory_that_threads_share_is_an_error(refuse_after: Refuse) -> None:
    """It is kept, and so only asked for when a call needs more than those before."""
    before = torch.get_num_threads()
    try:
        for allocation in range(3):
            call = attention(5000 + 5000 * allocation)
            torch.set_num_threads(1)
            expected = call()  # without it
            torch.set_num_threads(9)
            with torch_on_one_thread():
                refuse_after(allocation)
                with pytest.raises(OutOfMemoryError):
                    call()
                refuse_after(-1)
                assert torch.equal(call(), expected)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("options", [{}, {"enforce_eager": True}], ids=["recorded", "eager"])
def test_an_engine_without_memory_raises_and_goes_on(options, refuse_after, make_llm) -> None:
    """Later answers are right: nothing that the failed step wrote is taken for a cached prefix."""
    questions = [question for question, _ in demo_model.entries()[:3]]
    params = SamplingParams(temperature=0, max_tokens=12)
    llm = make_llm(demo_model.MODEL, device="cpu", num_threads=2, **options)
    expected = [output.text for output in llm.generate(questions, params, use_tqdm=False)]
    for allocation in (0, 1, 2, 30, 101):
        llm.reset_prefix_cache()
        refuse_after(allocation)
        with pytest.raises(OutOfMemoryError, match="lower max_num_batched_tokens"):
            llm.generate(questions, params, use_tqdm=False)
        refuse_after(-1)
        texts = [output.text for output in llm.generate(questions, params, use_tqdm=False)]
        assert texts == expected, f"after allocation {allocation} was refused"


def test_kernels_allocate_through_scratch_and_team_memory_alone() -> None:
    sources = (path for path in SOURCES if path.name not in ("kernels.h", "threads.c"))
    assert not [path.name for path in sources if "alloc(" in path.read_text()]
