"""How a call of a C kernel is written for `nv_run`."""

from nanovllm.kernels.cpu.calls import CALL_BYTES, CSRC, KERNELS, pack_call, size_of


def test_every_kernel_is_found_and_fits_a_call():
    code = "".join(path.read_text() for path in CSRC.glob("*.c"))
    assert len(KERNELS) == code.count("\nvoid nv_")
    assert all(8 * (1 + len(kinds)) <= CALL_BYTES for kinds in KERNELS.values())
    assert f"CALL_WORDS = {CALL_BYTES // 8} " in (CSRC / "kernels.h").read_text()


def test_a_call_has_the_kernels_number_and_its_arguments():
    call = pack_call("nv_scale", [16, 80, 32, 5, 64, 0.5])
    words = memoryview(call).cast("q")
    assert len(call) == CALL_BYTES
    assert [*words[:6]] == [[*KERNELS].index("nv_scale"), 16, 80, 32, 5, 64]
    assert memoryview(call).cast("d")[6] == 0.5
    assert size_of("nv_scale", [16, 80, 32, 5, 64, 0.5]) == 5
    assert size_of("nv_pack", [16, 32, 5, 64]) is None
