"""The files of a batch: what is done, so that a killed job resumes where it stopped.

Next to OUTPUT is the directory OUTPUT.parts while the job is not done:

- `manifest.json`: the input, the model and the options. Another job is refused. When OUTPUT is
  written, it also says which file that is.
- `rows.jsonl`: a line for each finished row, its number, a tab, and its output. Appended in the
  order in which rows are finished; a torn line at the end is dropped.
- `lock`: locked by the driver. The lock ends with its process.
"""

import contextlib
import json
import os
import re
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from filelock import FileLock, Timeout

from nanovllm.errors import ConfigError
from nanovllm.options.validation import shown
from nanovllm.utils.system import MOVES_OPEN_FILES

_LINE = re.compile(rb"(\d{1,18})\t(\{.*\})\n")
_SYNC_SECONDS = 1.0
"""After a power cut, rows that were finished in the last second may be computed again."""


class Journal:
    """The finished rows of a job, in a file that is only appended to.

    Memory: no row's output. `num_leading` rows from the first on are done, and the set of done
    rows after these is small, because the job begins rows in order.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("a+b", buffering=0)
        self.num_leading = 0
        self._beyond: set[int] = set()
        self._synced = time.monotonic()
        os.truncate(self._file.fileno(), self._read())

    def _read(self) -> int:
        """Note the rows of the file; return where its last whole line ends."""
        end = 0
        with self._path.open("rb") as file:
            for line in file:
                found = _LINE.fullmatch(line)
                if found is None:
                    break
                self._note(int(found[1]))
                end += len(line)
        return end

    def __len__(self) -> int:
        return self.num_leading + len(self._beyond)

    def __contains__(self, index: int) -> bool:
        return index < self.num_leading or index in self._beyond

    def append(self, index: int, output: bytes) -> None:
        """Keep the output of a row, a line of JSON. A row that is kept already stays."""
        if index in self:
            return
        data = memoryview(b"%d\t%b\n" % (index, output))
        while data:  # a signal, or a disk that is nearly full, may cut a write
            data = data[self._file.write(data) :]
        self._note(index)
        if time.monotonic() - self._synced > _SYNC_SECONDS:
            os.fsync(self._file.fileno())
            self._synced = time.monotonic()

    def in_order(self) -> Iterator[bytes]:
        """Yield the outputs of all rows in the order of the input."""
        waiting: dict[int, bytes] = {}
        following = 0
        with self._path.open("rb") as file:
            for line in file:
                number, _, output = line.rstrip(b"\n").partition(b"\t")
                waiting[int(number)] = output
                while following in waiting:
                    yield waiting.pop(following)
                    following += 1

    def close(self) -> None:
        """Write all to the disk, and close the file. Repeated calls do nothing."""
        if not self._file.closed:
            os.fsync(self._file.fileno())
            self._file.close()

    def _note(self, index: int) -> None:
        if index in self:
            return
        self._beyond.add(index)
        while self.num_leading in self._beyond:
            self._beyond.remove(self.num_leading)
            self.num_leading += 1


class JobFiles:
    """The directory OUTPUT.parts, locked.

    Args:
        identity: what decides the output, as JSON.

    Raises:
        ConfigError: another driver runs the job; OUTPUT is there already; or what is done belongs
            to another job.
    """

    def __init__(self, output: Path, identity: Mapping[str, Any]) -> None:
        self.output = output = output.resolve()  # a link would have a separate directory
        self.directory = output.with_name(output.name + ".parts")
        self._is_done = False
        with contextlib.ExitStack() as stack:
            if output.exists() and not (self.directory / "manifest.json").exists():
                raise ConfigError(
                    f"the output {shown(str(output))} exists: name another, or remove it"
                )
            self._identity = identity
            stack.enter_context(_job_directory(self.directory, identity))
            if self.num_failed is None:
                self._check_no_output()
            self.journal = Journal(self.directory / "rows.jsonl")
            stack.callback(self.journal.close)
            self._stack = stack.pop_all()

    def _check_no_output(self) -> None:
        if os.path.lexists(self.output):
            raise ConfigError(
                f"the output {shown(str(self.output))} exists, and this job has not written it: "
                f"move it away, and run the same again; what is done is in {self.directory}"
            )

    @property
    def num_failed(self) -> int | None:
        """How many rows of OUTPUT have errors; None if this job has not written it yet.

        It has, if a driver was killed between writing OUTPUT and removing what it is made of.
        """
        manifest = json.loads((self.directory / "manifest.json").read_bytes())
        if not self.output.exists() or manifest.get("output") != _stamp(self.output):
            return None
        failed: int = manifest["failed rows"]
        return failed

    @contextlib.contextmanager
    def writing(self, num_failed: int) -> Iterator[BinaryIO]:
        """Yield a file that becomes OUTPUT when the block ends.

        Raises:
            ConfigError: somebody else has made OUTPUT.
        """
        path = self.directory / "output"
        with path.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        done = {"output": _stamp(path), "failed rows": num_failed}
        _write_manifest(self.directory, {**self._identity, **done})
        self._check_no_output()
        os.replace(path, self.output)
        _sync_directory(self.output.parent)

    def remove(self) -> None:
        """Remove the directory: the job is done. Its manifest, which says so, goes last."""
        self.journal.close()
        for path in self.directory.iterdir():
            if path.name not in ("manifest.json", "lock"):
                path.unlink()
        (self.directory / "manifest.json").unlink()
        self._is_done = True
        if MOVES_OPEN_FILES:
            self._remove_lock()

    def close(self) -> None:
        """Give the lock back."""
        self._stack.close()
        if self._is_done and not MOVES_OPEN_FILES:
            with contextlib.suppress(OSError):  # another driver has begun the same job
                self._remove_lock()

    def _remove_lock(self) -> None:
        (self.directory / "lock").unlink()
        self.directory.rmdir()


def _stamp(path: Path) -> list[int]:
    """Return what tells a file from any that others write: renaming the file keeps it."""
    status = path.stat()
    return [status.st_size, status.st_mtime_ns]


@contextlib.contextmanager
def _job_directory(directory: Path, identity: Mapping[str, Any]) -> Iterator[None]:
    """Hold the locked directory of a job; a new one is made, with the job's manifest.

    Args:
        identity: what decides the outputs, as JSON.

    Raises:
        ConfigError: it cannot be made, another process works there, or it holds something else.
    """
    try:
        directory.mkdir(exist_ok=True)
    except OSError as error:
        reason = error.strerror or error
        raise ConfigError(f"the directory {directory} cannot be made: {reason}") from None
    with _lock(directory):
        if (directory / "manifest.json").exists():
            _check_manifest(directory / "manifest.json", identity)
        elif set(os.listdir(directory)) - {"lock", "manifest.json.new"}:
            raise ConfigError(f"{directory} holds other files and no job: name another, or move it")
        else:
            _write_manifest(directory, identity)
        (directory / "manifest.json.new").unlink(missing_ok=True)  # a torn one
        yield


def _write_manifest(directory: Path, manifest: Mapping[str, Any]) -> None:
    """Write the manifest atomically: readers never see a part of it."""
    new = directory / "manifest.json.new"
    with new.open("w", encoding="utf-8") as file:
        file.write(json.dumps(manifest, indent=1, default=repr) + "\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(new, directory / "manifest.json")
    _sync_directory(directory)


def _check_manifest(path: Path, identity: Mapping[str, Any]) -> None:
    """Raise ConfigError if the manifest at `path` is another job's: it says what differs."""
    wanted = json.loads(json.dumps(identity, default=repr))
    try:
        found = json.loads(path.read_bytes())
    except ValueError:
        raise ConfigError(f"{path} is damaged: remove {path.parent} to begin again") from None
    for name in wanted:
        before = found.get(name)
        now = wanted[name]
        if isinstance(before, dict) and isinstance(now, dict):
            differing = [key for key in {**before, **now} if before.get(key) != now.get(key)]
            if differing:
                name = f"{name}: {differing[0]}"
                before = before.get(differing[0])
                now = now.get(differing[0])
        if before != now:
            raise ConfigError(
                f"{path.parent} holds rows of another job: its {name} is {shown(before)}, now "
                f"{shown(now)}; give the same, name another output, or remove {path.parent}"
            )


def _lock(directory: Path) -> contextlib.AbstractContextManager[object]:
    """Lock a directory, until the context that this returns ends, or this process.

    Raises:
        ConfigError: somebody holds it, or the file system has no locks.
    """
    try:
        return FileLock(directory / "lock", timeout=0).acquire()
    except Timeout:
        raise ConfigError(f"another process works on {directory}: wait for it, or end it") from None
    except (OSError, NotImplementedError) as error:
        raise ConfigError(f"{directory} cannot be locked: {error}") from None


def _sync_directory(directory: Path) -> None:
    """Write the names of a directory's files to the disk; Windows sees to that."""
    if sys.platform == "win32":
        return
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
