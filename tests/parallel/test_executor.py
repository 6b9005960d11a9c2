"""What the executors set up. What they do with ranks is in tests/test_tensor_parallel.py."""

import socket
import subprocess
import sys

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


FIRST = """
import gc, sys, weakref
from nanovllm import LLM, demo_model
assert "torch" not in sys.modules
llm = LLM(demo_model.MODEL, device="cpu", max_model_len=64)
assert gc.isenabled() and gc.get_freeze_count()
llm.generate("A KV cache is", use_tqdm=False)
found = weakref.ref(llm.engine)
del llm
gc.collect()
assert found() is None
"""


@pytest.mark.long
def test_the_first_engine_of_a_process_is_freed():
    """Symptom: frames that torch keeps in a cycle were frozen, and with them who imported it."""
    subprocess.run([sys.executable, "-c", FIRST], check=True)
