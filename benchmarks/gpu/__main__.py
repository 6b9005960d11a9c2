"""Test and measure on a CUDA machine: `python -m benchmarks.gpu --parts bandwidth,nano --out DIR`.

Each part is a process with a time limit. Its figures are saved as they come, so a part that fails
or is cut costs no other part. Weights are random, in the shapes of Qwen3; nothing is downloaded.
Writes results.json, page.md and log.txt. Exits with 1 if a part or a test failed, with 2 without a
CUDA device.
"""

import argparse
import contextlib
import datetime
import importlib.metadata
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.part import ROOT, Record
from benchmarks.gpu.report import PARTS, page, section

if sys.platform == "win32":
    sys.exit("benchmarks.gpu ends processes in groups, which Windows has not: run it in WSL")

MODULE = "benchmarks.gpu"
_EXIT_SECONDS = 5
"""Of a part's limit, the seconds that are left to end its process."""
_LEAST_SECONDS = 15
"""A part is not begun with less."""


def run_part(name: str, out: Path, scratch: Path, seconds: float) -> dict[str, Any]:
    """Run a part in a process of its own, at most `seconds`; return its figures and its end."""
    path = out / "part.json"
    path.unlink(missing_ok=True)
    start = time.monotonic()
    command = [sys.executable, "-m", MODULE, "--out", str(out), "--part", name]
    command += ["--scratch", str(scratch), "--seconds", str(seconds - _EXIT_SECONDS)]
    ended = run_limited(command, out / "log.txt", seconds)
    figures = json.loads(path.read_text()) if path.exists() else {}
    path.unlink(missing_ok=True)
    taken = time.monotonic() - start
    return {**figures, "ended": ended, "seconds": taken}


def run_limited(command: Sequence[str], log: Path, seconds: float) -> str:
    """Run a command, append its output to `log`, and return how it ended.

    Kills the process after `seconds`, and then whatever processes it has started.
    """
    with log.open("a", encoding="utf-8") as output:
        print("===", *command, file=output, flush=True)
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            return f"cut after {seconds:.0f} s"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return "done" if code == 0 else f"exit status {code}"


def run_parts(call: dict[str, Any], parts: list[str], out: Path, deadline: float) -> None:
    """Run the parts in turn; write the results and the page again after each.

    Args:
        call: receives the results.
        deadline: of time.monotonic(). A part that does not fit before it gets what is left.
    """
    results = call["results"]
    with tempfile.TemporaryDirectory() as scratch:
        for name in parts:
            limit = PARTS[name].seconds
            seconds = min(limit, deadline - time.monotonic())
            if results.get("smoke", {}).get("off"):
                ended = "not begun: the Triton kernels are off"
                results[name] = {"ended": ended, "seconds": 0.0, "limit": limit}
            elif seconds < _LEAST_SECONDS:
                ended = "not begun: the call's time was over"
                results[name] = {"ended": ended, "seconds": 0.0, "limit": limit}
            else:
                results[name] = {**run_part(name, out, Path(scratch), seconds), "limit": limit}
            write(out / "results.json", json.dumps(call, indent=1))
            write(out / "page.md", page([call]))
            print(f"{name}: {results[name]['ended']}, {results[name]['seconds']:.0f} s")
            print(*section(name, results), sep="\n", flush=True)


def write(path: Path, text: str) -> None:
    """Write a file; a reader never sees half of it."""
    temporary = path.with_suffix(".tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


def failed(results: Mapping[str, Any]) -> bool:
    """Return whether a part did not end as it should, or a test file did not pass."""
    files = [file for part in results.values() for file in part.get("files", {}).values()]
    return any(part["ended"] != "done" for part in results.values()) or any(
        file["ended"] not in ("passed", "left out") for file in files
    )


def names_of_parts(text: str) -> list[str]:
    """Return the parts named in `text`, in its order.

    Raises:
        argparse.ArgumentTypeError: a name is unknown or given twice.
    """
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in PARTS:
            known = ", ".join(PARTS)
            raise argparse.ArgumentTypeError(f"there is no part {name!r}; the parts are {known}")
        if names.count(name) > 1:
            raise argparse.ArgumentTypeError(f"part {name!r} is given twice")
    if not names:
        raise argparse.ArgumentTypeError("no part is named")
    return names


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(prog=f"python -m {MODULE}", description=__doc__)
    out = os.environ.get("OUT")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path(out) if out else None,
        required=not out,
        help="directory for results; default: the variable OUT",
    )
    parser.add_argument(
        "--parts",
        type=names_of_parts,
        default=list(PARTS),
        help=f"names with commas between them; default: all, {','.join(PARTS)}",
    )
    parser.add_argument(
        "--minutes", type=float, default=9.0, help="limit for all parts together; default: 9"
    )
    for hidden in ("--part", "--scratch", "--seconds"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


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


def main() -> int:
    """Run the parts and return the exit status."""
    args = parse()
    deadline = time.monotonic() + 60 * args.minutes
    import torch

    if not torch.cuda.is_available():
        print(f"{MODULE}: there is no CUDA device here", file=sys.stderr)
        return 2
    out: Path = args.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    if args.part is not None:
        record = Record(out / "part.json", Path(args.scratch), float(args.seconds))
        record.listen()
        PARTS[args.part].run(record)
        record.save()
        return 0
    os.environ["HF_HUB_OFFLINE"] = "1"
    # For what the tests start elsewhere: the package need not be installed.
    places = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(places)
    (out / "log.txt").unlink(missing_ok=True)
    call: dict[str, Any] = {
        "machine": describe_machine(),
        "command": f"python -m {MODULE} --parts {','.join(args.parts)} --minutes {args.minutes:g}",
        "results": {},
    }
    run_parts(call, args.parts, out, deadline)
    return int(failed(call["results"]))


if __name__ == "__main__":
    sys.exit(main())
