"""Carries compiled Triton kernels from machine to machine, in a file.

Triton keeps absolute paths in its cache, so the cache has the same place on all machines. What
lets a machine find the kernels of another is in carried/sitecustomize.py.
"""

import os
import tarfile
from pathlib import Path

FILE = "kernels.tar.xz"
HOOK = Path(__file__).parent / "carried"
_PLACE = "/tmp/nanovllm-triton"
_KEPT = (".cubin", ".json", ".so")
"""What runs. Triton also keeps what it compiled them from."""


def cache_folder() -> Path:
    """Return the folder of Triton's cache: that of TRITON_CACHE_DIR, or one below /tmp."""
    return Path(os.environ.get("TRITON_CACHE_DIR") or _PLACE)


def variables() -> dict[str, str]:
    """Return the variables with which a process uses the cache and finds kernels in it."""
    places = os.pathsep.join([str(HOOK), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {"TRITON_CACHE_DIR": str(cache_folder()), "PYTHONPATH": places}


def unpack(file: Path) -> None:
    """Add the kernels of a file to the cache."""
    cache_folder().mkdir(mode=0o700, parents=True, exist_ok=True)
    with tarfile.open(file) as packed:
        packed.extractall(cache_folder(), filter="data")


def pack(file: Path) -> None:
    """Write the kernels of the cache to a file."""
    folder = cache_folder()
    with tarfile.open(file, "w:xz", preset=1) as packed:
        for path in sorted(folder.glob("*/*")):
            if path.suffix in _KEPT:
                packed.add(path, path.relative_to(folder))


def num_kernels() -> int:
    """Return the number of kernels in the cache."""
    return sum(1 for _ in cache_folder().glob("*/*.cubin"))
