"""The files of a checkpoint, of which none is trusted: each is checked before it is opened.

Knows no file by name. Imports no torch.
"""

from pathlib import Path
from typing import Any

from nanovllm.checkpoint.json_object import MAX_JSON_BYTES, parse_object
from nanovllm.errors import CheckpointError
from nanovllm.options.validation import shown


def local_path(model: str, kind: str = "model") -> Path:
    """Return `model` as a path, which may not exist; `kind` is what errors call it."""
    try:
        local = Path(model).expanduser()
        local.exists()
    except (OSError, RuntimeError) as error:  # a name that is too long, an unknown user
        raise CheckpointError(f"{kind} {model!r} cannot be a path or a hub id: {error}") from error
    return local


def check_file(directory: Path, name: str, max_bytes: int | None = None) -> bool:
    """Return whether a checkpoint's `directory` has file `name`, which is then safe to open.

    The hub's cache keeps a snapshot's files in ../../blobs and links to them.

    Raises:
        CheckpointError: the file is outside the directory, too large, or not a regular file (to
            open a FIFO would wait for ever).
    """
    try:
        file, home = (directory / name).resolve(), directory.resolve()
        exists, is_file = file.exists(), file.is_file()
        size = file.stat().st_size if is_file else 0
    except (OSError, RuntimeError, ValueError) as error:  # a loop of links, a zero byte, ...
        raise CheckpointError(
            f"{directory}: cannot open file {shown(name)}: {error!s:.200}"
        ) from error
    homes = [home]
    if home.parent.name == "snapshots":
        homes.append(home.parent.parent / "blobs")
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


def read_json(file: Path) -> dict[str, Any]:
    """Return the JSON object in `file`, {} if there is no such file.

    Raises:
        CheckpointError: the file cannot be read, or holds no valid JSON object.
    """
    try:
        with file.open("rb") as opened:
            content = opened.read(MAX_JSON_BYTES + 1)
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise CheckpointError(f"cannot read {file}: {error}") from error
    return parse_object(content, str(file))
