"""What the executors set up. What they do with ranks is in tests/test_tensor_parallel.py."""

import socket
import subprocess
import sys
from typing import Any

import pytest
from torch.distributed import TCPStore

from nanovllm.errors import EngineDeadError
from nanovllm.parallel.rank_executor import RankExecutor
from nanovllm.parallel.rank_process import CommandResult
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


class Interrupted:
    """Ranks of which one answers; then Ctrl-C comes while a message is sent or received."""

    size = 2

    def __init__(self, method: str) -> None:
        self.method = method
        self.num_calls = 0
        self.has_ended = False

    def _call(self, method: str) -> None:
        self.num_calls += method == self.method
        if method == self.method and self.num_calls == 2:
            raise KeyboardInterrupt

    def send(self, rank: int, message: memoryview) -> None:
        self._call("send")

    def receive(self, rank: int) -> Any:
        self._call("receive")
        return "ok", CommandResult(rank)

    def wait(self) -> list[int]:
        self._call("wait")
        return [0]

    def alive(self) -> bool:
        return True

    def end(self, *, at_once: bool = False) -> None:
        self.has_ended = True


@pytest.mark.parametrize(
    ("method", "reason"),
    [
        ("send", "interrupted while the ranks were being told what to do; make a new LLM"),
        ("receive", "interrupted while a rank answered; make a new LLM"),
        ("wait", "interrupted while the ranks answered; make a new LLM"),
    ],
)
def test_what_an_interrupt_leaves_half_done_ends_the_ranks(method: str, reason: str) -> None:
    """Symptom: rank 0's next message was read from its middle, or was another command's."""
    ranks = Interrupted(method)
    executor = RankExecutor(ranks)
    with pytest.raises(KeyboardInterrupt):
        executor.call_all(print)
    assert ranks.has_ended
    with pytest.raises(EngineDeadError, match=reason):
        executor.call_all(print)
