"""What a page says of the machine: GPU, driver, versions, commit."""

import datetime
import importlib.metadata
import os
import platform
import subprocess

from benchmarks.gpu.packages import missing_packages
from benchmarks.gpu.part import ROOT


def describe_machine() -> dict[str, str]:
    """Return the GPU, the time and the versions, by name."""
    import torch

    query = "name,memory.total,driver_version,power.limit,clocks.max.sm"
    gpu = output_of(["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"])
    name, *details = gpu.splitlines()[0].split(", ") if gpu else [torch.cuda.get_device_name()]
    versions = {}
    for package in ("torch", "triton", "transformers", "flash-attn", "vllm"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "not installed"
    return {
        "GPU": name,
        "began": datetime.datetime.now(datetime.UTC).isoformat(" ", "minutes"),
        "memory, driver, power limit, clock": ", ".join(details) or "unknown",
        "CPU": f"{os.cpu_count()} cores, {platform.machine()}",
        "Python": platform.python_version(),
        "CUDA": str(torch.version.cuda),
        **versions,
        "packages that are missing": ", ".join(missing_packages()) or "none",
        # A machine may have a copy of the files without their history.
        "commit": os.environ.get("GIT_COMMIT")
        or output_of(["git", "-C", str(ROOT), "rev-parse", "HEAD"])
        or "unknown",
    }


def output_of(command: list[str]) -> str:
    """Return what a command prints, or an empty string if it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()
