"""Builds wheels in dist/: with compiled kernels for a system, and without ("any", and the sdist).

    python -m tools.wheels [linux_x86_64 | linux_aarch64 | macos_arm64 | any ...]

Without a target, all. gcc compiles for Linux: clang's code is up to 1.8 times as slow there. zig
(pip install ziglang) links it for an old glibc, and compiles for macOS, whose compiler is clang.
"""

import base64
import hashlib
import platform
import shutil
import subprocess
import sys
import tempfile
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from nanovllm.kernels.cpu.calls import CSRC, FLAGS, c_files
from nanovllm.kernels.cpu.variants import LIBRARIES, VARIANTS

ROOT = Path(__file__).parents[1]
DIST = ROOT / "dist"
MOST_BYTES = 15 * 10**6
ZIG = (sys.executable, "-m", "ziglang", "cc", "-target")


class Target(NamedTuple):
    """A system for which a wheel has compiled kernels."""

    tag: str
    machine: str
    zig: str

    @property
    def is_linux(self) -> bool:
        return self.tag.startswith("manylinux")

    def compiler(self) -> list[str]:
        """Return the command that compiles, but for the flags."""
        if not self.is_linux:
            return [*ZIG, self.zig]
        gcc = f"{self.machine}-linux-gnu-gcc"
        if platform.machine() == self.machine and shutil.which(gcc) is None:
            gcc = "gcc"
        if shutil.which(gcc) is None:
            sys.exit(
                f"there is no {gcc}; Debian and Ubuntu have it in gcc-{self.machine}-linux-gnu"
            )
        return [gcc]


TARGETS = {
    "linux_x86_64": Target("manylinux_2_28_x86_64", "x86_64", "x86_64-linux-gnu.2.28"),
    "linux_aarch64": Target("manylinux_2_28_aarch64", "aarch64", "aarch64-linux-gnu.2.28"),
    "macos_arm64": Target("macosx_11_0_arm64", "arm64", "aarch64-macos.11.0"),
}


def compiled(target: Target, name: str, directory: Path) -> Path:
    """Return a variant's library in `directory`. A part of its name is a digest of its content."""
    objects = directory / name
    objects.mkdir(parents=True)
    sources = c_files(objects)
    flags = [*FLAGS, *VARIANTS[target.machine][name].compiler_flags]
    command = [*target.compiler(), *flags, "-g0", "-w", f"-I{CSRC}", "-c"]

    def compile_file(source: Path) -> str:
        output = str(objects / f"{source.stem}.o")
        subprocess.run([*command, str(source), "-o", output], check=True)
        return output

    with ThreadPoolExecutor() as pool:
        files = [*pool.map(compile_file, sources)]
    library = objects / "library.so"
    link = [*ZIG, target.zig, "-shared", "-s", *files, "-o", str(library), "-lm", "-lpthread"]
    # Without a name, macOS's is the path of this directory.
    named = () if target.is_linux else (f"-Wl,-install_name,@rpath/{library.name}",)
    subprocess.run([*link, *named], check=True)
    digest = hashlib.sha256(library.read_bytes()).hexdigest()[:16]
    return library.rename(directory / f"cpu-{name}.{digest}.so")


def with_libraries(wheel: Path, tag: str, libraries: list[Path]) -> Path:
    """Write a wheel for `tag` beside the one for any system, with the libraries in addition."""
    output = wheel.with_name(wheel.name.replace("-any.whl", f"-{tag}.whl"))
    folder = LIBRARIES.relative_to(ROOT).as_posix()
    added = {f"{folder}/{library.name}": library.read_bytes() for library in libraries}
    with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(output, "w", zipfile.ZIP_DEFLATED) as new:
        contents = {info.filename: old.read(info) for info in old.infolist()} | added
        (record,) = (name for name in contents if name.endswith(".dist-info/RECORD"))
        about = record.replace("RECORD", "WHEEL")
        text = contents[about].decode()
        text = text.replace("Tag: py3-none-any", f"Tag: py3-none-{tag}")
        contents[about] = text.replace("Purelib: true", "Purelib: false").encode()
        del contents[record]
        lines = [f"{name},{_digest(content)},{len(content)}" for name, content in contents.items()]
        contents[record] = "\n".join([*lines, f"{record},,", ""]).encode()
        for name, content in contents.items():
            info = zipfile.ZipInfo(name)  # of 1980: the same sources make the same wheel
            info.compress_type, info.external_attr = zipfile.ZIP_DEFLATED, 0o100644 << 16
            new.writestr(info, content)
    if output.stat().st_size > MOST_BYTES:
        sys.exit(f"{output.name} has {output.stat().st_size} bytes, more than {MOST_BYTES}")
    return output


def _digest(content: bytes) -> str:
    digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=")
    return f"sha256={digest.decode()}"


def build(targets: list[str]) -> list[Path]:
    """Build the targets' wheels, and with "any" the sdist, into dist/. Return them."""
    DIST.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory)
        command = [sys.executable, "-m", "build", "--outdir", directory, str(ROOT)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        (wheel,), (sdist,) = place.glob("*.whl"), place.glob("*.tar.gz")
        made = []
        for name in targets:
            if name == "any":
                made += [wheel, sdist]
                continue
            target = TARGETS[name]
            libraries = [compiled(target, each, place / name) for each in VARIANTS[target.machine]]
            made.append(with_libraries(wheel, target.tag, libraries))
        return [Path(shutil.copy(each, DIST)) for each in made]


def main(arguments: list[str]) -> None:
    known = [*TARGETS, "any"]
    for name in arguments:
        if name not in known:
            sys.exit(f"{name!r} is no target; choose from {', '.join(known)}")
    for made in build(arguments or known):
        sys.stdout.write(f"{made.relative_to(ROOT)}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
