"""Compile Triton kernels without a GPU: `python -m benchmarks.gpu.prebuild --out DIR`.

Runs parts of benchmarks.gpu over the stand-in for CUDA, which compiles their kernels for Hopper,
and writes DIR/kernels.tar.xz for the option --kernels of benchmarks.gpu. With `--python` also
compiles the modules that launch kernels for another Python, and checks that its Triton finds the
kernels. Exits with 1 if it does not, and with 2 where the stand-in cannot run.
"""

import argparse
import json
import os
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.gpu import carry
from benchmarks.gpu.part import ROOT
from benchmarks.gpu.standin.__main__ import variables
from benchmarks.gpu.standin.build import Unavailable, build, header_folders

PARTS = "smoke,nano,packed,speculation"
"""Parts that compile the kernels of the plan's first two calls."""
_ASK = """import json, sysconfig
print(json.dumps([sysconfig.get_config_var("EXT_SUFFIX"), sysconfig.get_path("include")]))"""


def main() -> int:
    """Compile, check and pack."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.prebuild", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="directory for kernels.tar.xz")
    parser.add_argument("--parts", default=PARTS, help=f"that are run; default: {PARTS}")
    parser.add_argument(
        "--python", default=sys.executable, help="with Triton, as the GPU's machine has it"
    )
    args = parser.parse_args()
    command = ["-m", "benchmarks.gpu.standin", "--out", str(args.out), "--parts", args.parts]
    limits = ["--minutes", "60", "--patience", "10"]
    ended = subprocess.run([sys.executable, *command, *limits], cwd=ROOT, check=False).returncode
    if ended not in (0, 1):
        return ended
    with tempfile.TemporaryDirectory() as folder:
        try:
            library = build(Path(folder), ())
            compile_modules(args.python, library)
        except Unavailable as error:
            print(error, file=sys.stderr)
            return 2
        environment = {**os.environ, **carry.variables(), **variables(library)}
        here, there = (probe(python, environment) for python in (sys.executable, args.python))
    carry.pack(args.out / carry.FILE)
    size = (args.out / carry.FILE).stat().st_size / 1e6
    print(f"{carry.num_kernels()} kernels and {there['modules']} modules: {size:.1f} MB")
    print(f"{args.python}: {json.dumps(there)}")
    found = here["key"] == there["key"] and there["loaded"] == there["modules"] > 0
    print("its Triton finds the kernels" if found else f"its Triton does not find them: {here}")
    return int(not found)


def compile_modules(python: str, library: Path) -> None:
    """Compile Triton's C modules in the cache for another Python, unless it is as this one.

    Args:
        python: the program.
        library: libcuda.so.1, for the linker.
    """
    done = subprocess.run([python, "-c", _ASK], capture_output=True, text=True, check=True)
    suffix, include = json.loads(done.stdout)
    if suffix == sysconfig.get_config_var("EXT_SUFFIX"):
        return
    flags = ["-O3", "-shared", "-fPIC", "-Wno-psabi", f"-L{library.parent}", f"-l:{library.name}"]
    flags += [f"-I{path}" for path in (*header_folders()[-1:], include)]
    for source in sorted(carry.cache_folder().glob("*/*.c")):
        module = source.with_suffix(suffix)
        if not module.exists():
            subprocess.run(["gcc", str(source), *flags, "-o", str(module)], check=True)


def probe(python: str, environment: Mapping[str, str]) -> dict[str, Any]:
    """Return what a Python finds in the cache; carried/probe.py prints it."""
    script = str(carry.HOOK / "probe.py")
    done = subprocess.run([python, script], env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{python} {script} failed:\n{done.stderr}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


if __name__ == "__main__":
    sys.exit(main())
