"""Runs a job with the engine that the command line names; see __init__.py."""

import importlib
import json
import os
import sys
import time
from typing import Any


def main() -> None:
    """Run the job on standard input."""
    job = json.load(sys.stdin)
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever the engine prints goes to standard error
    module = importlib.import_module(f"{sys.argv[1]}_engine")  # from the folder of this file
    out.write(json.dumps({"engine": module.version()}) + "\n")
    engine = module.Engine(job["model"], **job["options"])
    for name, calls in job["ways"]:
        start = time.monotonic()
        answers: list[Any] = []
        for call in calls:
            found = engine.generate([job["requests"][index] for index in call])
            answers += zip(call, found, strict=True)
        line = {"way": name, "answers": answers, "counts": engine.counts()}
        line["seconds"] = time.monotonic() - start
        out.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
