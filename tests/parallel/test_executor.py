"""What the executors set up. What they do with ranks is in tests/test_tensor_parallel.py."""

import socket

import pytest
from torch.distributed import TCPStore

from nanovllm.utils.distributed import make_store


def test_the_ranks_meeting_point_is_closed_to_other_machines():
    """Symptom: the port was open on every network interface."""
    store = make_store()
    TCPStore("127.0.0.1", store.port, is_master=False).set("key", "value")
    assert store.get("key") == b"value"
    with pytest.raises(ConnectionRefusedError):  # another address of this machine
        socket.create_connection(("127.0.0.2", store.port), timeout=5)
