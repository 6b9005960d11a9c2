"""The simulator computes what the PTX manual says, and refuses what a GPU does not allow. That it
runs whole kernels is shown by their own tests, with SIMULATED_GPU.
"""

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies

from tests.every_case import examples
from tests.kernels.triton.simulator import arithmetic
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


def test_an_asynchronous_copy():
    """Of 100 + the number of the thread."""
    out, source = torch.zeros(32, dtype=torch.int32), torch.arange(100, 132, dtype=torch.int32)
    code = """
        mov.b32 %r1, global_smem;
        add.s32 %r1, %r1, %at;
        mul.wide.u32 %d0, %tid, 4;
        add.s64 %d0, %d0, %a1;
        cp.async.ca.shared.global [ %r1 + 0 ], [ %d0 + 0 ], 0x4, 4;
        cp.async.commit_group;
        cp.async.wait_group 0;
        ld.shared.b32 %r0, [%r1];
    """
    run(code + store("%r0"), out, source, threads=32)
    assert torch.equal(out, source)


def test_a_chained_kernel_waits_before_it_stores():
    wait = "griddepcontrol.wait;"
    assert result_of(f"mov.b32 %r0, 7; {wait}") == [7] * 64
    with pytest.raises(KernelError, match="a store before the wait"):
        result_of("mov.b32 %r0, 7;" + store("%r0") + wait)


def test_shuffles():
    """Of the lanes 0 to 31, in segments of 32 and of 8."""
    lanes = np.arange(32)
    expected = {
        "bfly.b32 %r0, %tid, 3, 31": lanes ^ 3,
        "up.b32 %r0, %tid, 2, 0": np.where(lanes < 2, lanes, lanes - 2),
        "down.b32 %r0, %tid, 5, 31": np.where(lanes + 5 > 31, lanes, lanes + 5),
        "idx.b32 %r0, %tid, 9, 31": np.full(32, 9),
        "idx.b32 %r0, %tid, 3, 6175": lanes // 8 * 8 + 3,  # 24 << 8 | 31
    }
    for code, lane in expected.items():
        assert result_of(f"shfl.sync.{code}, -1;", threads=32) == lane.tolist(), code


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


def compute(op, *operands):
    operation = arithmetic.find(op)
    values = [
        arithmetic.decode(
            np.array(value & (2 ** (8 * arithmetic.width(type)) - 1)).astype(
                arithmetic.bits_type(type)
            ),
            type,
        )
        for value, type in zip(operands, operation.sources, strict=True)
    ]
    with np.errstate(all="ignore"):
        return int(arithmetic.encode(operation.function(*values), operation.result))


integers = strategies.integers(-(2**63), 2**63 - 1)


def wrap(value, bits, signed):
    value %= 2**bits
    return value - 2**bits if signed and value >> (bits - 1) else value


@given(integers, integers, integers)
@settings(max_examples=examples(200))
def test_integers_agree_with_pythons(x, y, z):
    for bits in (32, 64):
        for kind in "su":
            type, signed, mask = f"{kind}{bits}", kind == "s", 2**bits - 1
            a, b, c = (wrap(value, bits, signed) for value in (x, y, z))
            quotient = abs(a) // abs(b) * (-1 if (a < 0) != (b < 0) else 1) if b else None
            expected = {
                f"add.{type}": a + b,
                f"mul.hi.{type}": a * b >> bits,
                f"mad.lo.{type}": a * b + c,
                f"max.{type}": max(a, b),
                f"setp.lt.{type}": a < b,
                **({} if quotient is None else {f"div.{type}": quotient}),
                **({} if quotient is None else {f"rem.{type}": a - quotient * b}),
                f"shr.{type}": a >> (b % 70) if signed or b % 70 < bits else 0,
                f"shl.{type}": a << (b % 70),
            }
            for op, value in expected.items():
                second = b % 70 if op.startswith("sh") else b
                operands = (a, second, c) if op.startswith("mad") else (a, second)
                assert compute(op, *operands) == value & mask, (op, operands)
    first = x % 32
    count = y % (33 - first)
    field = (z % 2**32) >> first & (2**count - 1)
    assert compute("bfe.u32", z, first, count) == field
    signed = wrap(field, count, True) if count else 0
    assert compute("bfe.s32", z, first, count) == signed % 2**32
    assert compute("mul.wide.s32", x, y) == wrap(x, 32, True) * wrap(y, 32, True) % 2**64


@pytest.mark.parametrize(
    ("op", "operands", "result"),
    [
        ("prmt.b32", (0x44332211, 0x88776655, 0x7531), 0x88664422),
        ("prmt.b32", (0x44332291, 0, 0x8888), 0xFFFFFFFF),  # the sign of byte 0
        ("popc.b32", (0xF0F0F001,), 13),
        ("cvt.s64.s32", (-3,), 2**64 - 3),
        ("cvt.u64.u32", (-3,), 2**32 - 3),
        ("cvt.s16.s8", (0x1FE,), 0xFFFE),
        ("cvt.rn.bf16x2.f32", (0x3F800000, 0x3F808000), 0x3F803F80),  # 1.00390625: to even
        ("cvt.rn.f16x2.f32", (0x3F800000, 0xC0000000), 0x3C00C000),
        ("cvt.rz.f16.f32", (0x3F801FFF,), 0x3C00),
        ("max.NaN.f32", (0x7FC00000, 0x3F800000), 0x7FC00000),
        ("max.relu.s32", (0xFFFFFFFB, 0xFFFFFFFE), 0),  # -5, -2
        ("max.relu.s32", (0xFFFFFFFB, 7), 7),
        ("min.relu.s32", (0xFFFFFFFB, 7), 0),
        ("cvt.rna.tf32.f32", (0x3F801000,), 0x3F802000),  # away from zero
        ("cvt.rna.tf32.f32", (0xFFFFFFFF,), 0x7FFFFFFF),  # NaN stays NaN
        ("min.xorsign.abs.f32", (0x7FC00000, 0xC3E00000), 0xC3E00000),
        ("min.NaN.xorsign.abs.f32", (0x7FC00000, 0x43E00000), 0x7FC00000),
        ("cvt.rn.satfinite.e4m3x2.f32", (0x44000000, 0x3F800000), 0x7E38),  # 512 becomes 448
        ("cvt.rn.f16x2.e4m3x2", (0x7E38,), 0x5F003C00),
        ("fma.rn.f32", (0x3F800001, 0x3F800001, 0xBF800002), 0x28800000),  # 2^-46: rounded once
        ("add.bf16x2", (0x3F803F80, 0x3F804000), 0x40004040),
        ("max.f32", (0x7FC00000, 0x3F800000), 0x3F800000),  # the other one, not NaN
        ("setp.eq.f32", (0x7FC00000, 0x7FC00000), 0),
        ("setp.neu.f32", (0x7FC00000, 0x3F800000), 1),
        ("setp.ne.f32", (0x7FC00000, 0x3F800000), 0),
        ("ex2.approx.f32", (0x40400000,), 0x41000000),
    ],
)
def test_bits(op, operands, result):
    assert compute(op, *operands) == result


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
