"""Recording the kernel calls of a forward pass."""

import subprocess
import sys

from tests.helpers import ROOT

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
