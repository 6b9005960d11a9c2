"""Tests what a learner wrote, in a process of its own: it may never return, or end the process.

`python -m nanovllm.apps.learn.grade EXERCISE FILE` is that process. The test is the one in
EXERCISE, the course's own file, whatever has become of the one in FILE.
"""

import inspect
import os
import runpy
import subprocess
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nanovllm.apps.learn.course import Lesson
from nanovllm.utils.terminal import complain, write

PATIENCE = 120
"""Seconds that a test may take. The slowest takes some seconds, most of them to import torch."""
_NOT_SOLVED = 1


def grade(lesson: Lesson, file: Path, patience: float = PATIENCE) -> bool:
    """Return whether the function in `file` passes the lesson's test; what is wrong is written."""
    command = [sys.executable, "-P", "-m", __name__, str(lesson.exercise), str(file)]
    try:
        done = subprocess.run(command, env=environment(), timeout=patience, check=False)
        return done.returncode == 0
    except subprocess.TimeoutExpired:
        complain(f"{file.name}: stopped after {patience:g} seconds: does a loop never end?")
        return False


def environment() -> dict[str, str]:
    """Return the variables of a process that imports this nanovllm, wherever it runs."""
    paths = [str(Path(__file__).parents[3]), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


def main() -> int:
    """Test a file, and return the exit status: 0 if it is solved."""
    exercise, file = sys.argv[1:]
    name = Path(file).name
    sys.path.append(str(Path(file).parent))  # for what the file may import
    check = runpy.run_path(exercise)["check"]
    function = next(iter(inspect.signature(check).parameters))
    try:
        found = _function(runpy.run_path(file), function)
        check(found)
    except NotImplementedError:
        write(f"{name}: {function} is not written yet.\n")
    except AssertionError as error:
        write(f"{name}: not yet.\n{str(error) or _traceback(error, file)}\n")
    except KeyboardInterrupt:
        return 130
    except BaseException as error:  # the learner's code may do anything, sys.exit() too
        write(f"{name}: {function} raised an error.\n{_traceback(error, file)}")
    else:
        return 0
    return _NOT_SOLVED


def _function(names: Mapping[str, Any], name: str) -> Any:
    if not callable(names.get(name)):
        raise NameError(f"the file has no function {name}")
    return names[name]


def _traceback(error: BaseException, file: str) -> str:
    """Return the lines of the learner's file that led to an error, and the error."""
    frames = [
        frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file
    ]
    return "".join(traceback.format_list(frames) + traceback.format_exception_only(error))


if __name__ == "__main__":
    sys.exit(main())
