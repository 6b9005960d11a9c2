"""What huggingface_hub's cache holds: pulls models into it, checks, lists and deletes them.

Reads the names and sizes of files; of a file's content only its checksum. Imports no torch.
"""

import hashlib
import logging
import re
from collections import Counter
from collections.abc import Iterator, Sequence as Seq
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from nanovllm.errors import CheckpointError
from nanovllm.loading.files import is_gguf, local_path
from nanovllm.loading.hub import Checkpoint, open_checkpoint, weight_files
from nanovllm.options.validation import did_you_mean, listed, shown
from nanovllm.utils.progress import progress_bar

if TYPE_CHECKING:
    from huggingface_hub import CachedRepoInfo, CachedRevisionInfo, HFCacheInfo

logger = logging.getLogger(__name__)

_CHUNK = 2**20
_MAX_LISTED = 8
_SUMS = {64: "SHA-256", 40: "Git's SHA-1"}
"""By the length of a blob's name in hexadecimal digits: which checksum of its content it is."""
_QUANTIZATION = re.compile(
    r"[-._]((?:UD-)?(?:I?Q\d\w*|TQ\d\w*|MXFP4\w*|BF16|F16|F32))\.gguf$", re.IGNORECASE
)


class CachedModel(NamedTuple):
    """A model in the cache: a repository with safetensors, or one GGUF file of a repository."""

    name: str
    """What `LLM` and the commands take: OWNER/NAME, OWNER/NAME:TAG or OWNER/NAME/FILE.gguf."""
    repo: str
    revision: str
    """The commit's hash."""
    path: Path
    """Its directory, or the GGUF file."""
    size: int
    """Bytes on the disk."""
    modified: float
    """Unix time in seconds."""
    is_whole: bool
    """Whether its weights are here."""


def pull(model: str, revision: str | None = None, download_dir: str | None = None) -> CachedModel:
    """Download what is missing of a hub model, and compare every file with the hub's checksum.

    A damaged file is deleted, so that the next pull gets it again.

    Args:
        model: a hub id, which may end in a tag or a file as for `open_checkpoint`.
        download_dir: where downloads go; None is huggingface_hub's cache.

    Raises:
        CheckpointError: `model` is a path on this machine, the hub does not have it or does not
            give it, the disk is full, or a file is damaged.
    """
    if local_path(model).exists():
        raise CheckpointError(f"model {model!r} is a path on this machine: nothing is to be pulled")
    try:
        checkpoint = open_checkpoint(model, revision, download_dir)
        weight_files(checkpoint, model, revision, download_dir)
    except CheckpointError as error:
        known = [each.name for each in cached_models(download_dir)]
        here = f"; here are: {listed(known, _MAX_LISTED)}" if known else ""
        raise CheckpointError(f"{error}{here}") from error
    found = (checkpoint.path, *checkpoint.path.parents)
    snapshot = next(path for path in found if path.parent.name == "snapshots")
    path = snapshot.resolve() / checkpoint.path.relative_to(snapshot)
    _check_sums(snapshot, model)
    return next(
        each
        for repo in _repos(_scan(download_dir))
        for revision in repo.revisions
        for each in _models_of(repo, revision)
        if each.path == path
    )


def cached_models(download_dir: str | None = None) -> list[CachedModel]:
    """Return the models in the cache by name, each in its main or else its newest revision."""
    return sorted(
        model for repo in _repos(_scan(download_dir)) for model in _models_of(repo, _newest(repo))
    )


def find_model(name: str, download_dir: str | None = None) -> CachedModel:
    """Return the model in the cache that `name` means.

    Raises:
        CheckpointError: there is none, or there are several.
    """
    known = cached_models(download_dir)
    found = [each for each in known if name in _names(each)]
    if not found:
        found = [each for each in known if each.repo == name]
    if len(found) == 1:
        return found[0]
    if found:
        names = listed([each.name for each in found], _MAX_LISTED)
        raise CheckpointError(f"{name} holds {len(found)} models; name one of them: {names}")
    raise CheckpointError(f"model {shown(name)} is not in the cache{_what_is_here(name, known)}")


def _what_is_here(name: str, known: Seq[CachedModel]) -> str:
    """Return the end of an error about a model that is not here: how to get it, and what is."""
    way = f": `nanovllm pull {name}` gets it" if name.count("/") == 1 and " " not in name else ""
    if not known:
        return f"{way}; the cache has no models"
    names = [each.name for each in known]
    meant = did_you_mean(name, names)
    hint = meant if meant.startswith("; did") else f"; here are: {listed(names, _MAX_LISTED)}"
    return way + hint


def remove(name: str, download_dir: str | None = None) -> int:
    """Delete a model, in all its revisions; return the bytes that are free now.

    Args:
        name: of a model, or of a repository with several GGUF files, all of which it deletes.

    Raises:
        CheckpointError: there is no such model, or it cannot be deleted.
    """
    info = _scan(download_dir)
    repos = {repo.repo_id: repo for repo in _repos(info)}
    if (repo := repos.get(name)) is None:
        model = find_model(name, download_dir)
        repo = repos[model.repo]
        if len([*_models_of(repo, _newest(repo))]) > 1:
            return _remove_file(repo, model.path)
    assert info is not None
    size = repo.size_on_disk
    info.delete_revisions(*(revision.commit_hash for revision in repo.revisions)).execute()
    if repo.repo_path.exists():
        raise CheckpointError(f"{repo.repo_path} cannot be deleted: may you write there?")
    return size


def _remove_file(repo: "CachedRepoInfo", path: Path) -> int:
    """Delete one file of a repository in all revisions; return the bytes that are free now."""
    size = 0
    for revision in repo.revisions:
        for file in revision.files:
            if file.file_name == path.name:
                size += file.size_on_disk if file.blob_path.exists() else 0
                try:
                    _unlink(file.file_path)
                except OSError as error:
                    raise CheckpointError(f"{path} cannot be deleted: {error.strerror}") from None
    return size


def _unlink(file: Path) -> None:
    """Delete a snapshot's link and what it leads to."""
    for path in (
        {file.resolve(), file.parent / file.readlink(), file} if file.is_symlink() else {file}
    ):
        path.unlink(missing_ok=True)


def _scan(download_dir: str | None) -> "HFCacheInfo | None":
    """Return what the cache holds; None without a cache."""
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        info = scan_cache_dir(None if download_dir is None else local_path(download_dir))
    except (CacheNotFound, ValueError):  # a file in its place
        return None
    for warning in info.warnings:
        logger.warning("in the cache of models: %s", warning)
    return info


def _repos(info: "HFCacheInfo | None") -> "list[CachedRepoInfo]":
    """Return the repositories of models."""
    repos = [] if info is None else info.repos
    return [repo for repo in repos if repo.repo_type == "model" and repo.revisions]


def _newest(repo: "CachedRepoInfo") -> "CachedRevisionInfo":
    """Return the revision that a name without one means, as far as it is here."""
    return max(repo.revisions, key=lambda each: ("main" in each.refs, each.last_modified))


def _models_of(repo: "CachedRepoInfo", revision: "CachedRevisionInfo") -> Iterator[CachedModel]:
    """Yield the models in one revision of a repository."""
    where = (repo.repo_id, revision.commit_hash)
    files = [file for file in revision.files if is_gguf(file.file_path)]
    tags = Counter(_tag_in(file.file_name) for file in files)
    for file in files:
        tag = _tag_in(file.file_name)
        path = file.file_path
        in_repo = path.relative_to(revision.snapshot_path).as_posix()
        name = f"{repo.repo_id}:{tag}" if tag and tags[tag] == 1 else f"{repo.repo_id}/{in_repo}"
        yield CachedModel(name, *where, path, file.size_on_disk, file.blob_last_modified, True)
    if not files or any(file.file_path.suffix == ".safetensors" for file in revision.files):
        size = revision.size_on_disk - sum(file.size_on_disk for file in files)
        path = revision.snapshot_path
        try:
            is_whole = bool(weight_files(Checkpoint(path, {}, {}), str(path)))
        except CheckpointError:
            is_whole = False
        yield CachedModel(repo.repo_id, *where, path, size, revision.last_modified, is_whole)


def _names(model: CachedModel) -> set[str]:
    """Return what a model can be called: of a GGUF file also its file and its tag."""
    tag = _tag_in(model.path.name)
    named = (
        {f"{model.repo}:{tag}", f"{model.repo}/{model.path.name}"} if is_gguf(model.path) else ()
    )
    return {model.name, *named}


def _tag_in(file: str) -> str:
    """Return the quantization in the name of a GGUF file; "" without one."""
    found = _QUANTIZATION.search(file)
    return found[1] if found else ""


def _check_sums(snapshot: Path, model: str) -> None:
    """Compare the files of a snapshot with the checksums that the hub gave for them.

    The cache names each file's content by the hub's checksum of it.

    Raises:
        CheckpointError: a file is damaged; it has been deleted.
    """
    blobs = {}
    for file in sorted(snapshot.rglob("*")):
        if file.is_symlink():
            blob = file.parent / file.readlink()
            if re.fullmatch(r"[0-9a-f]{40}|[0-9a-f]{64}", blob.name):
                blobs[file] = blob
    total = sum(blob.stat().st_size for blob in blobs.values())
    with progress_bar(shown=True, total=total, desc="Checking", unit="B", unit_scale=True) as bar:
        for file, blob in blobs.items():
            if _sum_of(blob, bar) != blob.name:
                _unlink(file)
                raise CheckpointError(
                    f"{file.name} of {model!r} came damaged: its {_SUMS[len(blob.name)]} is not "
                    f"the hub's; it is deleted, so pull it again: `nanovllm pull {model}`"
                )


def _sum_of(blob: Path, bar: Any) -> str:
    """Return the checksum of a file's content, of the kind that the blob's name is."""
    size = blob.stat().st_size
    digest = hashlib.sha256()
    if len(blob.name) == 40:
        digest = hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)
    with blob.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
            bar.update(len(chunk))
    return digest.hexdigest()
