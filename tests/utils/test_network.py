"""The interface that has an address: where gloo and NCCL shall open their connections."""

import sys

import pytest

from nanovllm.utils.distributed import interface_of


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux")
def test_interface_of_an_address() -> None:
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("203.0.113.7") is None  # an address for documentation: nobody has it
    assert interface_of("::1") is None
