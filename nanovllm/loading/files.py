"""The files of a checkpoint, none of which is trusted: each is checked before it is opened.

Imports no torch.
"""

from pathlib import Path
from typing import Any

from nanovllm import demo_model
from nanovllm.errors import CheckpointError
from nanovllm.options.validation import shown
from nanovllm.utils import strict_json

MAX_JSON_BYTES = 4 * 2**20
"""Limit of one JSON text. Python's objects take up to 24 times as much memory. A header or an
index of 1,000 tensors has 0.1 MB."""
_MAX_DEPTH = 32
_POINTER = b"version https://git-lfs"
"""How a Git LFS pointer begins."""


def local_path(model: str, kind: str = "model") -> Path:
    """Return `model` as a path, which may not exist; `kind` is what errors call it.

    The names of the models that ship with nanovllm mean their directories.
    """
    try:
        local = Path(demo_model.NAMES.get(model, model)).expanduser()
        local.exists()
    except (OSError, RuntimeError) as error:  # a name that is too long, an unknown user
        raise CheckpointError(f"{kind} {model!r} cannot be a path or a hub id: {error}") from error
    return local


def check_file(directory: Path, name: str, max_bytes: int | None = None) -> bool:
    """Return whether a checkpoint's `directory` has file `name`, which is then safe to open.

    The hub's cache keeps a snapshot's files in ../../blobs and links to them.

    Raises:
        CheckpointError: the file is outside the directory, too large, or not a regular file (to
            open a FIFO would wait forever).
    """
    try:
        file = (directory / name).resolve()
        home = directory.resolve()
        exists = file.exists()
        is_file = file.is_file()
        size = file.stat().st_size if is_file else 0
    except (OSError, RuntimeError, ValueError) as error:  # a loop of links, a zero byte, ...
        raise CheckpointError(
            f"{directory}: cannot open file {shown(name)}: {error!s:.200}"
        ) from error
    homes = [home]
    for snapshot in (home, home.parent):  # a folder of it has its own files
        if snapshot.parent.name == "snapshots":
            homes.append(snapshot.parent.parent / "blobs")
    if not any(file.is_relative_to(allowed) for allowed in homes):
        raise CheckpointError(
            f"{directory}: file {shown(name)} is outside the directory; copy it into the directory"
        )
    if exists and not is_file:
        raise CheckpointError(f"{directory}: {shown(name)} is not a regular file; remove it")
    if max_bytes is not None and size > max_bytes:
        raise CheckpointError(
            f"{directory}: {shown(name)} has {size} bytes; at most {max_bytes} are read"
        )
    return is_file


def refuse_pointer(file: Path, head: bytes) -> None:
    """Refuse `file`, whose content begins with `head`, if it only says what the real one holds.

    Raises:
        CheckpointError: it is a Git LFS pointer, which a clone without git-lfs leaves.
    """
    if head.startswith(_POINTER):
        raise CheckpointError(
            f"{file} is a Git LFS pointer and not the file itself: install git-lfs and run "
            f"`git lfs pull` in {file.parent}"
        )


def read_json(file: Path) -> dict[str, Any]:
    """Return the JSON object in `file`, {} if there is no such file.

    Raises:
        CheckpointError: the file cannot be read, is a Git LFS pointer, or is not a valid JSON
            object.
    """
    try:
        with file.open("rb") as opened:
            content = opened.read(MAX_JSON_BYTES + 1)
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise CheckpointError(f"cannot read {file}: {error}") from error
    refuse_pointer(file, content)
    return parse_object(content, str(file))


def parse_object(text: bytes, source: str) -> dict[str, Any]:
    """Return the JSON object in `text`.

    NaN and Infinity are accepted, as Python's json does: check a number where it is used.

    Args:
        source: the file, for the error.

    Raises:
        CheckpointError: `text` is too long, not UTF-8, not valid JSON, nested too deep, not an
            object, or names a field twice.
    """
    if len(text) > MAX_JSON_BYTES:
        raise CheckpointError(f"{source} has more than {MAX_JSON_BYTES} bytes of JSON")
    try:
        value = strict_json.parse(text.decode("utf-8"), max_depth=_MAX_DEPTH, finite=False)
    except ValueError as error:
        raise CheckpointError(f"cannot read {source}: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{source} must hold a JSON object, not {type(value).__name__}")
    return value


def is_gguf(file: Path) -> bool:
    """Return whether `file` is named as a GGUF file is."""
    return file.suffix == ".gguf"


def is_mmproj(name: str) -> bool:
    """Return whether a GGUF file is named as one that only reads pictures for another one."""
    return "mmproj" in Path(name).name.lower()
