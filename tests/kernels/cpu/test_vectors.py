"""The functions of vectors.h against double precision."""

import math
import subprocess
from pathlib import Path

import pytest

from nanovllm.kernels.cpu import build
from tests.kernels.cpu.helpers import native

CSRC = Path(build.__file__).with_name("csrc")


@native
@pytest.mark.parametrize("flags", [build.NATIVE, "-O2"])
def test_tanh_exp_and_log1p_are_as_accurate_as_float32(tmp_path: Path, flags: str) -> None:
    program = tmp_path / "check"
    source = Path(__file__).with_name("check_vectors.c")
    command = [*build.find_compiler(), "-O2", flags, "-w", "-I", CSRC, source, "-o", program, "-lm"]
    subprocess.run(command, check=True)
    printed = subprocess.run([program], check=True, capture_output=True, text=True).stdout
    *errors, log1p_at_nan, at_infinity, at_minus_infinity, at_nan = map(float, printed.split())
    assert len(errors) == 5
    assert max(errors) < 2  # units of the last place
    assert (at_infinity, at_minus_infinity) == (1, -1)
    assert math.isnan(at_nan)
    assert math.isnan(log1p_at_nan)
