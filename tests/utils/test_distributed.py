"""The choice between symmetric memory and the group's own all-reduce, without GPUs; the interface
that gloo and NCCL get. test_tensor_parallel.py checks the sums on two GPUs.
"""

import logging
import sys
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from nanovllm.utils import distributed
from nanovllm.utils.distributed import (
    SymmetricAllReduce,
    all_reduce,
    make_symmetric_all_reduce,
)
from nanovllm.utils.system import interface_of


@pytest.fixture
def group() -> Iterator[None]:
    """A group with this process as its only rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_without_symmetric_memory_one_line_says_why(
    group: None, caplog: pytest.LogCaptureFixture
) -> None:
    """A machine without symmetric memory starts, and uses the group's own all-reduce."""
    with caplog.at_level(logging.INFO):
        assert make_symmetric_all_reduce(torch.device("cpu")) is None
    (record,) = [r for r in caplog.records if r.name == distributed.logger.name]
    assert "symmetric memory: " in record.getMessage()
    assert "all-reduce by NCCL alone" in record.getMessage()


class FakeAllReduce(SymmetricAllReduce):
    """Records the tensors that it is given and doubles them, as a sum over two equal ranks."""

    def __init__(self) -> None:
        self.given: list[torch.Tensor] = []
        self._buffer = torch.empty(0, device="meta")

    def all_reduce(self, x: torch.Tensor) -> None:
        self.given.append(x)
        x.mul_(2)


def test_the_group_sums_what_symmetric_memory_does_not_support(
    group: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    symmetric = FakeAllReduce()
    monkeypatch.setattr(distributed, "_symmetric", symmetric)
    monkeypatch.setattr(distributed, "_tensor_parallel", distributed.TensorParallel(0, 2))
    x = torch.ones(4)
    assert all_reduce(x) is x  # a CPU tensor: summed by the group, which has one rank
    assert x.tolist() == [1.0] * 4
    assert not symmetric.given
    monkeypatch.setattr(symmetric, "supports", lambda x: True)
    assert all_reduce(x).tolist() == [2.0] * 4
    assert len(symmetric.given) == 1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_supports_small_aligned_tensors() -> None:
    supports = FakeAllReduce().supports
    small = torch.zeros(8, 1024, dtype=torch.bfloat16, device="cuda")
    assert supports(small)
    assert supports(small.float())
    assert not supports(small.half())
    assert not supports(small.t())
    assert not supports(small[0, :3])
    assert not supports(
        torch.zeros(4 * 2**20, dtype=torch.uint8, device="cuda").view(torch.bfloat16)
    )


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux")
def test_interface_of_an_address() -> None:
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("203.0.113.7") is None  # an address for documentation: nobody has it
    assert interface_of("::1") is None
