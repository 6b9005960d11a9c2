"""Recording the kernel calls of a forward pass."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import torch

from nanovllm.kernels.cpu import ops as cpu_ops
from nanovllm.kernels.cpu.recording import Recording
from tests.helpers import ROOT
from tests.kernels.cpu.helpers import native, randn

MAKE = """
import sys
from nanovllm import LLM, demo_model
LLM(demo_model.MODEL, device="cpu")
assert "torch._dynamo" not in sys.modules
"""


def test_an_llm_on_a_cpu_does_not_import_dynamo():
    """Symptom: start-up takes 1 to 2 s longer."""
    done = subprocess.run([sys.executable, "-c", MAKE], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@native
def test_a_recording_is_of_its_thread():
    logits = randn(2, 10)
    with ThreadPoolExecutor(1) as pool, Recording(4) as recording:
        found = pool.submit(cpu_ops.greedy, logits).result()
    assert torch.equal(found, logits.float().argmax(-1))
    assert not recording._calls
