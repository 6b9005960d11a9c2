"""The simulator refuses what a GPU does not allow, and its tensor cores are no better than a GPU's.
That it computes what the PTX manual says is shown by the kernels' own tests, with SIMULATED_GPU.
"""

import numpy as np
import pytest
import torch

from tests.kernels.triton.simulator.driver import launch
from tests.kernels.triton.simulator.memory import KernelError
from tests.kernels.triton.simulator.warp import add_products


def run(code, *tensors, threads=64, programs=1, shared=512):
    """Run PTX whose parameters are `tensors`.

    %tid and %cta are the numbers of thread and program, %a0 and so on the addresses of the tensors,
    and %at is 4 * %tid.
    """
    pointers = "\n".join(f"ld.param.b64 %a{i}, [f_param_{i}];" for i in range(len(tensors)))
    ptx = f"""
        .visible .entry f(
            .param .u64 f_param_0
        )
        .reqntid {threads}
        {{
            .reg .pred %p<9>; .reg .b16 %h<9>; .reg .b32 %r<9>; .reg .b64 %d<9>;
            .reg .b32 %tid, %cta, %at; .reg .b64 %a<9>;
            mov.u32 %tid, %tid.x;  // a comment; with a semicolon
            mov.u32 %cta, %ctaid.x;
            shl.b32 %at, %tid, 2;
            {pointers}
            {code}
            ret;
        }}
    """
    launch(ptx, shared, (programs, 1, 1), [(tensor, "*i32") for tensor in tensors])


def store(register):
    """Return PTX that writes a register of 32 bits to the first tensor, where the thread's is."""
    return f"""
        mul.wide.u32 %d8, %tid, 4;
        add.s64 %d8, %d8, %a0;
        st.global.b32 [ %d8 + 0 ], {{ {register} }};
    """


def result_of(code, register="%r0", threads=64, **options):
    out = torch.zeros(threads, dtype=torch.int32)
    run(code + store(register), out, threads=threads, **options)
    return out.tolist()


def test_threads_diverge_and_meet():
    """Thread i goes round i % 5 times. All are counted where they meet."""
    found = result_of("""
        rem.u32 %r1, %tid, 5;
        mov.b32 %r0, 0;
        $again:
        setp.ge.u32 %p0, %r0, %r1;
        @%p0 bra $done;
        add.s32 %r0, %r0, 1;
        bra.uni $again;
        $done:
        redux.sync.add.s32 %r2, %r0, -1;
        @!%p0 ret;
    """)
    assert found == [thread % 5 for thread in range(64)]


def test_the_last_program_sees_all_others():
    """Most programs end early: their memory is dropped, those that are left go on."""
    counter, out = torch.zeros(1, dtype=torch.int32), torch.zeros(70, dtype=torch.int32)
    code = """
        setp.ne.b32 %p0, %tid, 0;
        @%p0 ret;
        atom.global.gpu.acq_rel.add.u32 %r0, [ %a0 + 0 ], 1;
        setp.ne.b32 %p1, %r0, 69;
        mul.wide.u32 %d0, %cta, 4;
        add.s64 %d0, %d0, %a1;
        st.global.b32 [ %d0 + 0 ], { %r0 };
        @%p1 ret;
        st.global.b32 [ %d0 + 0 ], { -1 };
    """
    run(code, counter, out, threads=32, programs=70)
    assert counter.item() == 70
    assert sorted(out.tolist()) == [-1, *range(69)]


def test_a_barrier_between_two_warps():
    found = result_of("""
        mov.b32 %r1, global_smem;
        add.s32 %r1, %r1, %at;
        st.shared.b32 [%r1], %tid;
        bar.sync 0;
        xor.b32 %r2, %at, 128;
        mov.b32 %r3, global_smem;
        add.s32 %r3, %r3, %r2;
        ld.shared.b32 %r0, [%r3];
    """)
    assert found == [thread ^ 32 for thread in range(64)]


def test_a_barrier_that_some_threads_pass_by():
    skip = "setp.lt.u32 %p0, %tid, 32; @%p0 bra $over; bar.sync 0; $over: "
    with pytest.raises(KernelError, match="different barriers"):
        result_of(skip + "bar.sync 0; bar.sync 0;")


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("%a0 + 4", "outside of the arguments"),  # of the last thread
        ("%a0 + -4", "outside of the arguments"),  # of the first thread
        ("%a0 + 2", "not aligned"),
    ],
)
def test_global_memory(address, message):
    base, offset = address.split(" + ")
    code = f"mul.wide.u32 %d0, %tid, 4; add.s64 %d0, %d0, {base};"
    with pytest.raises(KernelError, match=message):
        result_of(f"{code} ld.global.b32 {{ %r0 }}, [ %d0 + {offset} ];")


def test_the_end_of_shared_memory():
    code = "mov.b32 %r1, global_smem; add.s32 %r1, %r1, %at; st.shared.b32 [%r1], %tid;"
    result_of(code, shared=256)
    with pytest.raises(KernelError, match="outside of shared memory"):
        result_of(code, shared=252)


def test_a_chained_kernel_waits_before_it_stores():
    wait = "griddepcontrol.wait;"
    assert result_of(f"mov.b32 %r0, 7; {wait}") == [7] * 64
    with pytest.raises(KernelError, match="a store before the wait"):
        result_of("mov.b32 %r0, 7;" + store("%r0") + wait)


@pytest.mark.parametrize(
    "code",
    [
        "frobnicate.b32 %r0, %tid;",
        "add.sat.f32 %r0, %r1, %r2;",
        "cvt.rz.bf16.f32 %h0, %r1;",
        "cvt.rmi.f32.f32 %r0, %r1;",
        "fma.rn.f32.bf16 %r0, %h1, %h2, %r3;",
        "max.f32 %r0, %r1, %r2, %r3;",
        "setp.eq.and.s32 %p0, %r1, %r2, %p1;",
        "setp.eq.s32 %p0|%p1, %r1, %r2;",
        "bar.sync.aligned 0;",
    ],
)
def test_what_is_not_known_is_refused(code):
    with pytest.raises(NotImplementedError):
        result_of(code)


@pytest.mark.parametrize(
    ("products", "added", "bits", "expected"),
    [
        ([2.0**-24] * 16, 1.0, None, 1 + 2.0**-20),  # in float32 one by one: 1
        ([-(2.0**-24)] + [0.0] * 15, 1.0, None, 1 - 2.0**-24),
        ([1.5 * 2.0**-23] + [0.0] * 15, 1.0, None, 1 + 2.0**-23),  # to nearest: 1 + 2^-22
        ([-1.5 * 2.0**-23] + [0.0] * 15, -1.0, None, -1 - 2.0**-23),
        ([448.0] + [0.0625] * 31, 0.0, 13, 448 + 31 * 0.0625),
        ([448.0] + [0.03] * 31, 0.0, 13, 448.0),
        ([float("inf")] + [1.0] * 15, 1.0, None, float("inf")),
        ([0.0] * 16, 0.0, None, 0.0),
    ],
)
def test_tensor_cores_cut_and_do_not_round(products, added, bits, expected):
    a = np.array(products, np.float32)[None, None]
    b = np.ones((1, len(products), 1), np.float32)
    with np.errstate(all="ignore"):
        assert add_products(a, b, np.full((1, 1, 1), added, np.float32), bits).item() == expected


def test_tensor_cores_keep_nan():
    a = np.array([[[float("inf"), 1.0]]], np.float32)
    b = np.array([[[0.0], [1.0]]], np.float32)
    with np.errstate(all="ignore"):
        assert np.isnan(add_products(a, b, np.zeros((1, 1, 1), np.float32))).all()
