"""Compiles the C kernels for this processor, caches the library, and tests one product.

A cached library is named by a hash of the sources, compiler, flags and processor.
"""

import contextlib
import ctypes
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

import torch

from nanovllm.kernels.cpu.calls import CSRC, DISPATCH, SOURCES, c_files, pack_call
from nanovllm.utils import disk_cache
from nanovllm.utils.system import is_noexec, kill_group

logger = logging.getLogger(__name__)

_FLAGS = ("-O3", "-pthread", "-fPIC")
NATIVE = "-mcpu=native" if platform.machine() in ("aarch64", "arm64") else "-march=native"
COMPILING = "compiling the kernels for this processor"
_WITHOUT_TILES = ("-mno-amx-tile", "-mno-amx-bf16", "-mno-amx-int8")
_GUARDED = """exec 3<&0 </dev/null
(read -r _ <&3; kill -9 0) >/dev/null 2>&1 &
"$@" 3<&-
status=$?
kill -9 $!
exit $status"""
"""A shell's program: run a command; end its process group if the pipe at standard input closes."""
_COMPILER_SECONDS = 300
"""How long the compiler may take for all sources: seconds, and minutes on a busy machine."""
_ROOM = 16 * 2**20  # bytes that building takes, at most
_ERROR_LINES = 5
_ERROR_CHARACTERS = 500
"""How much of the compiler's complaint the log gets."""

PANEL = 32
"""Outputs per panel of a packed weight. In the KV cache, head_dim is padded to whole panels."""


class Unavailable(Exception):
    """The kernels cannot be used here; the message says why."""


def load(*architecture: str) -> ctypes.CDLL:
    """Return the library of kernels for this processor, after testing it.

    Args:
        architecture: compiler flags that replace NATIVE.

    Raises:
        Unavailable: the kernels cannot be built, or they compute wrong products.
    """
    if os.name != "posix":
        raise Unavailable("they need Linux or another POSIX system")
    flags = architecture or (NATIVE, *_choice_of_tiles())
    try:
        compiler = find_compiler()
        (version,) = _run([*compiler, "--version"])
        cache = disk_cache.cache_directory()
        for extra in ((), _WITHOUT_TILES):
            command = [*compiler, *_FLAGS, *flags, *extra]
            kernels = _load_or_build(cache, f"cpu-{_key(command, version)}.so", command)
            if kernels is not None:
                return kernels
    except (OSError, ValueError) as error:  # full or read-only disks, a CC with an open quote
        raise Unavailable(f"{error}") from error
    raise Unavailable("the system refuses AMX tiles to kernels built without them")


def _choice_of_tiles() -> tuple[str, ...]:
    """Return the flag for a processor that multiplies bfloat16 slower than float32.

    These are Intel's from Sapphire Rapids on, which are built to multiply it in AMX tiles: here
    AMX is masked. The vendor decides, not a measurement, so that a processor always gets the same
    kernels, and so the same bits. The compiler does not know the vendor.
    """
    intel = processor_field("vendor_id") == "GenuineIntel"
    return ("-DSLOW_DPBF16",) if intel and "avx512_fp16" in processor_flags() else ()


def _load_or_build(cache: Path | None, name: str, command: list[str]) -> ctypes.CDLL | None:
    """Open `name` in `cache`. If it is missing or unusable, build it again."""
    if cache is not None:
        try:
            disk_cache.check_file(cache / name)
            return _open(cache / name)
        except FileNotFoundError:
            pass
        except PermissionError as reason:
            logger.warning("compiling the kernels again: %s", reason)
        except (OSError, ValueError, Unavailable) as reason:
            logger.info("compiling the kernels again: %s", reason)
    # A warning, so that it is seen: the first start would be silent for up to minutes.
    logger.warning("%s%s", COMPILING, "" if cache is None else ", once")
    try:
        return _build(cache, name, command)
    except OSError as reason:  # full, or nothing in it may be run
        if cache is None:
            raise
        disk_cache.warn_not_kept(cache, reason)
    return _build(None, name, command)


def _build(cache: Path | None, name: str, command: list[str]) -> ctypes.CDLL | None:
    """Build and open the library in `cache`, or else where temporary files lie.

    Raises:
        OSError: there is no room, or no right to run what is there.
    """
    with disk_cache.new_directory(cache) as directory:
        if is_noexec(directory):
            raise PermissionError(f"{directory} is mounted noexec, and kernels are to be run")
        room = Path(directory, "room")
        room.write_bytes(bytes(_ROOM))  # before minutes of compiling that would fail
        room.unlink()
        library = Path(directory, name)
        _compile(command, library)
        disk_cache.seal(library)
        # Under this path: the loader takes a path that it knows for the library it has loaded.
        kernels = _open(library)
        disk_cache.store(library, cache)
    return kernels


def find_compiler() -> list[str]:
    """Return the compiler's command: $CC, split as a shell would, or else gcc or cc."""
    words = shlex.split(os.environ.get("CC", ""))
    if words:
        if shutil.which(words[0]) is None:
            raise Unavailable(f"CC names {words[0]!r:.200}, which is no program here")
        return words
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        raise Unavailable("there is no C compiler (gcc or cc)")
    return [compiler]


def _key(command: list[str], version: bytes) -> str:
    """Return a hash of all that decides the code."""
    sources = [(path.name, path.read_bytes()) for path in SOURCES]
    processor = (platform.machine(), processor_name(), sorted(processor_flags()))
    decisive = (sources, DISPATCH, command, version, processor)
    return hashlib.sha256(repr(decisive).encode()).hexdigest()[:24]


def _compile(command: list[str], library: Path) -> None:
    """Compile the sources side by side, and link them to `library`."""
    objects = {str(s): str(library.with_name(f"{s.stem}.o")) for s in c_files(library.parent)}
    command = [*command, f"-I{CSRC}"]
    _run(*([*command, "-c", source, "-o", output] for source, output in objects.items()))
    _run([*command, "-shared", *objects.values(), "-o", str(library), "-lm"])
    if not library.is_file():
        raise Unavailable(f"{_name(command)} reports success and writes no library")


def _run(*commands: list[str]) -> list[bytes]:
    """Run commands side by side, and return what each prints.

    Raises:
        Unavailable: a command fails or takes too long; those that still run are ended.
    """
    deadline = time.monotonic() + _COMPILER_SECONDS
    printed = []
    with contextlib.ExitStack() as stack:
        closes, opened = os.pipe()  # when this process is killed
        stack.callback(os.close, closes)
        stack.callback(os.close, opened)
        running = []
        for command in commands:
            process = subprocess.Popen(
                ["/bin/sh", "-c", _GUARDED, "sh", *command],
                stdin=closes,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                process_group=0,  # a compiler starts further processes
            )
            running.append(stack.enter_context(process))
            stack.callback(_end, process)
        for command, process in zip(commands, running, strict=True):
            try:
                output, errors = process.communicate(timeout=deadline - time.monotonic())
            except subprocess.TimeoutExpired as error:
                raise Unavailable(
                    f"{_name(command)} took more than {_COMPILER_SECONDS} seconds"
                ) from error
            if process.returncode:
                lines = errors.decode(errors="replace").splitlines()
                excerpt = "\n".join(sorted(lines, key=_rank)[:_ERROR_LINES])[:_ERROR_CHARACTERS]
                raise Unavailable(f"{_name(command)} failed with {process.returncode}: {excerpt}")
            printed.append(output)
    return printed


def _rank(line: str) -> int:
    """Return the place of a compiler's line in the log: errors, other lines, notes and warnings."""
    if " error: " in line:
        return 0
    return 2 if " note: " in line or " warning: " in line else 1


def _name(command: list[str]) -> str:
    return f"{Path(command[0]).name:.80}"


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill a compiler that has not been waited for, with the processes that it started."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            kill_group(process.pid)


def _open(path: Path) -> ctypes.CDLL | None:
    """Return the library at `path`, tested; None if the system refuses it AMX tiles.

    Raises:
        OSError: it cannot be loaded.
        Unavailable: it lacks a kernel, or computes wrong products.
    """
    kernels = ctypes.CDLL(str(path))
    for name in ("nv_enable", "nv_instructions", "nv_run"):
        if not hasattr(kernels, name):
            raise Unavailable(f"{path} has no {name}")
    kernels.nv_run.argtypes = [ctypes.c_char_p, *[ctypes.c_ssize_t] * 4]
    kernels.nv_run.restype = ctypes.c_size_t
    kernels.nv_instructions.restype = ctypes.c_char_p
    if not kernels.nv_enable():
        return None
    _self_test(kernels)
    return kernels


def processor_flags() -> frozenset[str]:
    """Return the processor's feature flags in /proc/cpuinfo, or none on other systems."""
    return frozenset(processor_field("flags", "Features").split())  # x86, ARM


def processor_name() -> str:
    """Return what /proc/cpuinfo or macOS calls the processor, "" on other systems."""
    if sys.platform == "darwin":
        command = ["/usr/sbin/sysctl", "-n", "machdep.cpu.brand_string"]
        return subprocess.run(command, capture_output=True, text=True).stdout.strip()
    return processor_field("model name", "CPU part")  # x86, ARM


def processor_field(*beginnings: str) -> str:
    """Return the first line of /proc/cpuinfo with one of these beginnings, without its name.

    "" if there is none, as on other systems.
    """
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as file:
        for line in file:
            if line.startswith(beginnings):
                return line.partition(":")[2].strip()
    return ""


def _self_test(kernels: ctypes.CDLL) -> None:
    """Compare a small product with torch's, to find a miscompilation before the kernels are used.

    Raises:
        Unavailable: the product is wrong, or the system refuses its memory.
    """
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(70, 608, generator=generator).bfloat16()
    x = torch.randn(37, 608, generator=generator).bfloat16()
    # NaN: in memory that is used again, an earlier test's right product may lie.
    packed = torch.full((3, 304, PANEL, 2), torch.nan, dtype=torch.bfloat16)
    y = torch.full((37, 70), torch.nan, dtype=torch.bfloat16)
    w, p, inputs, outputs = (tensor.data_ptr() for tensor in (weight, packed, x, y))
    calls = pack_call("nv_pack", [w, p, 70, 608])
    calls += pack_call("nv_linear", [inputs, 608, 0, p, 0, outputs, 70, 0, 37, 1, 70, 608, 0, 0])
    if kernels.nv_run(calls, 2, -1, -1, torch.get_num_threads()):
        raise Unavailable("there is no memory for a small product")
    expected = x.double() @ weight.double().T
    error = (y.double() - expected).abs().max()
    if not error <= 0.01 * expected.abs().max():  # also true for NaN
        raise Unavailable("the compiled kernels compute wrong products")
