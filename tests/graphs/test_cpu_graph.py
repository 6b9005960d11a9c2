"""Recording the kernel calls of a forward pass."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from nanovllm.features.graphs.cpu_graph import CPUGraph, Unrecordable
from nanovllm.features.quantization.rounding import rounded_rows
from nanovllm.kernels.cpu import ops
from nanovllm.kernels.cpu.kernels import CKernels
from nanovllm.layers.linear import RowParallelLinear
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
    with ThreadPoolExecutor(1) as pool, CPUGraph(4) as recording:
        found = pool.submit(ops.sample, logits).result()
    assert torch.equal(found, logits.float().argmax(-1))
    assert not recording._calls


@native
@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
def test_a_linear_with_a_bias_can_be_recorded(quantization):
    """Symptom: a model with biases takes its small steps without a recording."""
    layer = RowParallelLinear(64, 40, bias=True).bfloat16()
    layer.weight.data, layer.bias.data = randn(40, 64), randn(40, seed=1)
    weight, kernels = layer.weight.data, CKernels()
    method = kernels.pack(weight, is_embedding=False)
    if quantization is not None:
        rows = rounded_rows(quantization, weight, kernels)
        rows.store(0, weight)
        method = rows.method()
    layer.replace_weight(method)
    x = torch.zeros(4, 64, dtype=torch.bfloat16)
    with torch.inference_mode():
        with CPUGraph(4) as recording:
            y = layer(x)
        x.copy_(randn(4, 64, seed=2))
        recording.run(3, 3)
        assert torch.equal(y[:3], layer(x)[:3])
        assert not y[3].any()


@native
@pytest.mark.parametrize(
    ("method", "operation"), [("contiguous", "contiguous"), ("flatten", "flatten"), ("float", "to")]
)
def test_a_view_that_is_a_copy_cannot_be_recorded(method, operation):
    """Symptom: a recorded step reads what was there while it was recorded."""
    x = randn(4, 10)
    with torch.inference_mode(), CPUGraph(4):
        assert x.contiguous().flatten().bfloat16().data_ptr() == x.data_ptr()
        assert [part.shape[1] for part in x.split([3, 7], 1)] == [3, 7]
        with pytest.raises(Unrecordable, match=f"torch computes aten.{operation}"):
            getattr(x[:, :3], method)()
