"""The files that call the C kernels are those that tools/kernel_calls.py writes."""

import pytest

from nanovllm.kernels.cpu.calls import CALL_BYTES, pack_call, size_of
from nanovllm.kernels.cpu.signatures import KERNELS
from tools import kernel_calls


@pytest.mark.parametrize("path", kernel_calls.generated(), ids=lambda path: path.name)
def test_generated_files_are_current(path):
    expected = kernel_calls.generated()[path]
    assert path.read_text() == expected, "run: python -m tools.kernel_calls"


def test_every_kernel_fits_a_call():
    assert all(8 * (1 + len(kinds)) <= CALL_BYTES for kinds in KERNELS.values())
    assert (
        f"CALL_WORDS = {CALL_BYTES // 8} "
        in (kernel_calls.PACKAGE / "csrc" / "kernels.h").read_text()
    )


def test_a_call_has_the_kernels_number_and_its_arguments():
    call = pack_call("nv_scale", [16, 80, 32, 5, 64, 0.5])
    words = memoryview(call).cast("q")
    assert len(call) == CALL_BYTES
    assert [*words[:6]] == [[*KERNELS].index("nv_scale"), 16, 80, 32, 5, 64]
    assert memoryview(call).cast("d")[6] == 0.5
    assert size_of("nv_scale", [16, 80, 32, 5, 64, 0.5]) == 5
    assert size_of("nv_pack", [16, 32, 5, 64]) is None
