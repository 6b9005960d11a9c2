"""The process-wide settings of torch: an engine's while it runs, else the caller's."""

import contextlib

import pytest
import torch

from nanovllm.platform import Platform
from nanovllm.platform.cpu import CPU
from nanovllm.platform.cuda import CUDA

matmul = torch.backends.cuda.matmul


def reduced() -> tuple[bool, bool]:
    return (
        matmul.allow_bf16_reduced_precision_reduction,
        matmul.allow_fp16_reduced_precision_reduction,
    )


@pytest.fixture
def a_gpu(monkeypatch: pytest.MonkeyPatch) -> Platform:
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    return CUDA(torch.device("cuda", 0))


def test_a_gpu_adds_up_in_full_precision(a_gpu: Platform) -> None:
    """The caller's settings are back afterwards, also after an error."""
    assert reduced() == (True, True)  # torch's defaults
    with a_gpu.current(torch.get_num_threads()):
        assert reduced() == (False, False)
    assert reduced() == (True, True)
    with pytest.raises(ValueError, match="no"), a_gpu.current(torch.get_num_threads()):
        raise ValueError("no")
    assert reduced() == (True, True)


def test_what_the_caller_forbids_stays_forbidden(a_gpu: Platform) -> None:
    matmul.allow_bf16_reduced_precision_reduction = False
    try:
        with a_gpu.current(torch.get_num_threads()):
            assert reduced() == (False, False)
        assert reduced() == (False, True)
    finally:
        matmul.allow_bf16_reduced_precision_reduction = True


def test_threads_are_the_callers_again() -> None:
    before = torch.get_num_threads()
    with CPU().current(before + 1):
        assert torch.get_num_threads() == before + 1
    assert torch.get_num_threads() == before
