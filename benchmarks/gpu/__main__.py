"""Test and measure on a CUDA machine in under ten minutes: writes a JSON file for each part and one
page of tables to --out. Weights are random, in the shapes of Qwen3; nothing is downloaded.

Each part is a process with a time limit and saves its figures as they come, so a failure costs no
other part. Exits with 1 if a part failed, and with 2 without a CUDA device.
"""

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.gpu.engines import write_models
from benchmarks.gpu.machine import describe_machine
from benchmarks.gpu.part import Record
from benchmarks.gpu.report import PARTS, page

MODULE = "benchmarks.gpu"


def run_part(name: str, out: Path, seconds: float) -> dict[str, Any]:
    """Run a part in a process of its own and return its figures and how it ended."""
    path = out / f"{name}.json"
    path.unlink(missing_ok=True)
    start = time.monotonic()
    command = [sys.executable, "-m", MODULE, "--out", str(out), "--part", name]
    command += ["--seconds", str(seconds - 3)]
    with (out / f"{name}.log").open("w") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code = process.wait(seconds)
            ended = "done" if code == 0 else f"exit status {code}"
        except subprocess.TimeoutExpired:
            ended = f"out of time after {seconds:.0f} s"
        with contextlib.suppress(ProcessLookupError):  # its children too
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    figures = json.loads(path.read_text()) if path.exists() else {}
    return {**figures, "ended": ended, "seconds": time.monotonic() - start}


def run_parts(parts: list[str], minutes: float, out: Path, deadline: float) -> dict[str, Any]:
    """Run the parts in turn, write the page again after each, and return their results."""
    machine = describe_machine()
    name = f"{machine['GPU']}-{machine['date']}".lower().replace(" ", "-")
    command = f"python -m {MODULE} --parts {' '.join(parts)} --minutes {minutes:g}"
    results: dict[str, Any] = {}
    stretch = max(1.0, 60 * minutes / sum(PARTS[part].seconds for part in parts))
    for part in parts:
        seconds = min(PARTS[part].seconds * stretch, deadline - time.monotonic())
        if seconds < 10:
            results[part] = {"ended": "not begun: no time was left", "seconds": 0.0}
        else:
            results[part] = run_part(part, out, seconds)
        print(f"{part}: {results[part]['ended']}, {results[part]['seconds']:.0f} s", flush=True)
        whole = {"machine": machine, "command": command, "results": results}
        (out / f"{name}.json").write_text(json.dumps(whole, indent=1))
        (out / f"{name}.md").write_text(page(machine, command, results), encoding="utf-8")
    return results


def main() -> int:
    """Run the parts and return the exit status."""
    parser = argparse.ArgumentParser(prog=f"python -m {MODULE}", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="directory for results")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--minutes", type=float, default=9, help="limit for all parts together")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, help=argparse.SUPPRESS)
    args = parser.parse_args()
    deadline = time.monotonic() + 60 * args.minutes
    import torch

    if not torch.cuda.is_available():
        print(f"{MODULE}: there is no CUDA device here", file=sys.stderr)
        return 2
    out: Path = args.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    if args.part is not None:
        PARTS[args.part].run(Record(out / f"{args.part}.json", args.seconds))
        return 0
    os.environ["HF_HUB_OFFLINE"] = "1"
    write_models(out / "models")
    results = run_parts(args.parts, args.minutes, out, deadline)
    shutil.rmtree(out / "models")
    failed_files = any(
        file["ended"] != "passed" for file in results.get("tests", {}).get("files", {}).values()
    )
    return int(failed_files or any(part["ended"] != "done" for part in results.values()))


if __name__ == "__main__":
    sys.exit(main())
