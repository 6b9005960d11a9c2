"""Says where `make` takes torch from, as options of pip: without a GPU, from PyTorch's CPU index.

    python -m pip install $(python -m tools.torch_index) -c constraints.txt -e .

pip takes the highest version that all of its indexes have, and 2.13.0+cpu is higher than PyPI's
2.13.0, so one more index is enough. pip retries an index that does not answer for minutes: hence
the look at it first. TORCH_INDEX names another index.
"""

import contextlib
import ctypes
import os
import ssl
import sys
import threading
import urllib.request

CPU_INDEX = "https://download.pytorch.org/whl/cpu"
SECONDS = 5
OF_PIP = ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_NO_INDEX")
"""Whoever sets one of these has said where packages come from."""


def choose() -> tuple[str | None, str]:
    """Return the index that pip is to look at besides its own, if any, and a line for the user."""
    said = [name for name in OF_PIP if os.environ.get(name)]
    index = os.environ.get("TORCH_INDEX")
    if index is None:
        if said:
            return None, f"torch: from where {said[0]} says."
        if sys.platform != "linux":
            return None, "torch: PyPI's, 0.1 GB."
        if has_gpu():
            return None, "torch: PyPI's with CUDA, 2.7 GB, for the NVIDIA GPU."
        index = CPU_INDEX
    if not answers(index):
        return None, (
            f"torch: from where pip finds it, as {index} does not answer. "
            "PyPI's for Linux comes with CUDA: 2.7 GB."
        )
    return index, f"torch: for CPUs, 0.2 GB, from {index}."


def has_gpu() -> bool:
    """Return whether CUDA's driver is installed and finds a GPU that this process may use."""
    try:
        return bool(ctypes.CDLL("libcuda.so.1").cuInit(0) == 0)
    except (OSError, AttributeError):
        return False


def answers(index: str) -> bool:
    """Return whether a package index lists torch within SECONDS."""
    found = threading.Event()

    def look() -> None:
        with contextlib.suppress(OSError, ValueError):  # of the network; not a URL
            tls = ssl.create_default_context(cafile=os.environ.get("PIP_CERT"))
            urllib.request.urlopen(f"{index.rstrip('/')}/torch/", context=tls).close()
            found.set()

    # A thread, as no timeout covers the look-up of the name and each of a host's addresses.
    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    thread.join(SECONDS)
    return found.is_set()


def main() -> None:
    index, line = choose()
    sys.stderr.write(f"{line}\n")
    if index is not None:
        sys.stdout.write(f"--extra-index-url {index}\n")


if __name__ == "__main__":
    main()
