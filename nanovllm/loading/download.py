"""Fetches files of a repository of the Hugging Face hub, or finds them in its cache.

Imports no torch.
"""

import contextlib
import errno
import functools
import hashlib
import logging
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

from nanovllm.errors import CheckpointError
from nanovllm.loading.files import local_path
from nanovllm.options.model_names import hub_name, is_path
from nanovllm.utils.progress import QuietBar, progress_bar

_DISK_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES}
"""Of a disk that takes no more: it is full, or may not be written."""
_CHUNK = 2**20
_ID = re.compile(r"[\w.-]+(?:/[\w.-]+)?")


def plain_name(model: str, download_dir: str | None = None) -> str:
    """Return a path on this machine as it is, and other names as the cache or the hub has them.

    An address of the hub becomes its id. Letter case does not count in the ids of models that are
    in the cache, as it does not on the hub.

    Raises:
        CheckpointError: it is another program's name of a model, with what to write in its place.
    """
    if is_path(model) or local_path(model).exists():
        return model
    model = hub_name(model)
    found = _ID.match(model)
    if found is None or _repository(found[0], download_dir).is_dir():
        return model
    wanted = _repository(found[0], download_dir)
    same = [
        path.parent.name
        for path in wanted.parent.parent.glob("models--*/snapshots")
        if path.parent.name.casefold() == wanted.parent.name.casefold()
    ]
    if len(same) != 1:
        return model
    return "/".join(same[0].split("--")[1:]) + model[found.end() :]


def _repository(model: str, download_dir: str | None) -> Path:
    """Return where the cache has the snapshots of a hub id."""
    from huggingface_hub import constants

    cache = Path(constants.HF_HUB_CACHE) if download_dir is None else local_path(download_dir)
    return cache / "--".join(["models", *model.split("/")]) / "snapshots"


def download(
    model: str, revision: str | None, patterns: list[str], download_dir: str | None
) -> Path:
    """Return the directory with those files of hub repository `model` that match `patterns`.

    What comes is compared with the hub's checksums; a damaged file is fetched once more.

    Args:
        download_dir: where downloads go; None is huggingface_hub's cache.

    Raises:
        CheckpointError: there is no such repository or revision, neither the hub nor the cache
            has the files, or one comes damaged again and again.
    """
    import huggingface_hub

    fetch = functools.partial(
        huggingface_hub.snapshot_download,
        model,
        revision=revision,
        cache_dir=None if download_dir is None else str(local_path(download_dir)),
        allow_patterns=patterns,
        tqdm_class=QuietBar,
    )
    blobs = _repository(model, download_dir).parent / "blobs"
    here = set(os.listdir(blobs)) if blobs.is_dir() else set()
    with _few_warnings():
        for _ in range(2):
            path = _fetched(fetch, model, revision, download_dir)
            if not (damaged := remove_damaged(path.rglob("*"), but=here)):
                return path
    raise CheckpointError(
        f"{damaged[0]} of {model!r} came damaged twice: its checksum is not the hub's; it is "
        "deleted, so try again, by another network if it stays so"
    )


def _fetched(
    fetch: Callable[..., str], model: str, revision: str | None, download_dir: str | None
) -> Path:
    """Return the directory that `fetch` finds or fills; turn its errors into ours."""
    from huggingface_hub.errors import (
        HFValidationError,
        OfflineModeIsEnabled,
        RevisionNotFoundError,
    )

    try:
        try:
            return Path(fetch())
        except OfflineModeIsEnabled:  # huggingface_hub 1.33 lists a commit's files online
            return Path(fetch(local_files_only=True))
    except HFValidationError as error:
        raise CheckpointError(
            f"model {model!r} is neither a directory here nor a valid hub id: {error}"
        ) from error
    except RevisionNotFoundError as error:
        raise CheckpointError(f"hub model {model!r} has no revision {revision!r}") from error
    except Exception as error:  # huggingface_hub raises many types
        raise CheckpointError(_why_not(model, download_dir, error)) from error


@contextlib.contextmanager
def _few_warnings() -> Iterator[None]:
    """Keep huggingface_hub's advice off standard error, unless HF_HUB_VERBOSITY asks for it."""
    library = logging.getLogger("huggingface_hub")
    before = library.level
    if "HF_HUB_VERBOSITY" not in os.environ and before <= logging.WARNING:
        library.setLevel(logging.ERROR)
    try:
        yield
    finally:
        library.setLevel(before)


def remove_damaged(files: Iterable[Path], but: Collection[str] = ()) -> list[str]:
    """Delete those files of the cache that are not what the hub has; return their names.

    The cache names each file's content by the hub's checksum of it: SHA-256 of a large file, Git's
    SHA-1 of another one. A mirror may give the plain SHA-1. What lies elsewhere is left alone.
    """
    blobs = {}
    for file in files:
        if file.is_symlink() and file.exists():
            blob = Path(os.path.normpath(file.parent / file.readlink()))
            repository = blob.parent.parent
            is_ours = blob.parent.name == "blobs" and file.is_relative_to(repository / "snapshots")
            name = re.fullmatch(r"[0-9a-f]{40}|[0-9a-f]{64}", blob.name)
            if is_ours and name and blob.name not in but:
                blobs[file] = blob
    total = sum(blob.stat().st_size for blob in blobs.values())
    with progress_bar(
        shown=True, total=total, desc="Checking", unit="B", unit_scale=True, delay=1
    ) as bar:
        damaged = [file for file, blob in blobs.items() if blob.name not in _sums_of(blob, bar)]
    for file in damaged:
        blobs[file].unlink(missing_ok=True)
        file.unlink(missing_ok=True)
    return [file.name for file in damaged]


def _sums_of(blob: Path, bar: Any) -> list[str]:
    """Return the checksums of a file's content, of the kinds that the blob's name may be."""
    digests = [hashlib.sha256()]
    if len(blob.name) == 40:
        head = b"blob %d\0" % blob.stat().st_size
        digests = [hashlib.sha1(start, usedforsecurity=False) for start in (head, b"")]
    with blob.open("rb") as file:
        while chunk := file.read(_CHUNK):
            for digest in digests:
                digest.update(chunk)
            bar.update(len(chunk))
    return [digest.hexdigest() for digest in digests]


def _why_not(model: str, download_dir: str | None, error: Exception) -> str:
    """Return why a download failed, and what to do."""
    from huggingface_hub import constants
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    if isinstance(error, GatedRepoError):
        return (
            f"the hub gives {model!r} only to those who have accepted its terms, at "
            f"{constants.ENDPOINT}/{model}, and are logged in: `hf auth login`, or set HF_TOKEN"
        )
    if isinstance(error, RepositoryNotFoundError):
        return (
            f"model {model!r} is neither a directory here nor a model on the hub "
            "(or a private one: log in)"
        )
    if isinstance(error, OSError) and error.errno in _DISK_ERRORS:
        return (
            f"cannot write {model!r} to {download_dir or constants.HF_HUB_CACHE}: "
            f"{error.strerror}; `hf cache rm` deletes models, and download_dir names another place"
        )
    return (
        f"cannot get {model!r} from the hub: {error} - it is not (wholly) in the local cache; "
        f"{way_online()}, or give a local directory"
    )


def way_online() -> str:
    """Return how to reach the hub: which variable forbids it, if one does."""
    import huggingface_hub

    names = [name for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE") if os.environ.get(name)]
    if huggingface_hub.constants.HF_HUB_OFFLINE and names:
        return f"connect once with {names[0]} unset"
    return "connect once"


def hub_files(model: str, revision: str | None) -> list[str]:
    """Return the names of the files of hub repository `model`; none if the hub cannot be asked."""
    import huggingface_hub

    try:
        return sorted(huggingface_hub.list_repo_files(model, revision=revision))
    except Exception:  # offline, ...: then the cache has the file or not
        return []
