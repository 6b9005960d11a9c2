"""What the executors set up. What they do with ranks is in tests/test_tensor_parallel.py."""

import gc
import socket

import pytest
from torch.distributed import TCPStore

from nanovllm.parallel.executor import _first_import_of
from nanovllm.utils.distributed import make_store


def test_the_ranks_meeting_point_is_closed_to_other_machines():
    """Symptom: the port was open on every network interface."""
    store = make_store()
    TCPStore("127.0.0.1", store.port, is_master=False).set("key", "value")
    assert store.get("key") == b"value"
    with pytest.raises(ConnectionRefusedError):  # another address of this machine
        socket.create_connection(("127.0.0.2", store.port), timeout=5)


def test_the_collector_runs_again_after_an_import():
    with _first_import_of("torch"):  # which is imported: the user's objects are not frozen
        assert gc.isenabled()
    before = gc.get_freeze_count()
    with _first_import_of("no_such_library"):
        assert not gc.isenabled()
    assert gc.isenabled()
    assert gc.get_freeze_count() > before
    gc.unfreeze()
