"""Fetches files of a repository of the Hugging Face hub, or finds them in its cache.

Imports no torch.
"""

import errno
import functools
import os
from pathlib import Path

from nanovllm.errors import CheckpointError
from nanovllm.loading.files import local_path
from nanovllm.options.model_names import other_form

_DISK_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES}
"""Of a disk that takes no more: it is full, or may not be written."""


def check_name(model: str) -> None:
    """Check that `model`, if it is not a file here, is not another program's name of a model.

    Raises:
        CheckpointError: it is, with what to write in its place.
    """
    if (remedy := other_form(model)) and not local_path(model).exists():
        raise CheckpointError(remedy)


def download(
    model: str, revision: str | None, patterns: list[str], download_dir: str | None
) -> Path:
    """Return the directory with those files of hub repository `model` that match `patterns`.

    Args:
        download_dir: where downloads go; None is huggingface_hub's cache.

    Raises:
        CheckpointError: there is no such repository or revision, or neither the hub nor the cache
            has the files.
    """
    import huggingface_hub
    from huggingface_hub.errors import (
        HFValidationError,
        OfflineModeIsEnabled,
        RevisionNotFoundError,
    )

    fetch = functools.partial(
        huggingface_hub.snapshot_download,
        model,
        revision=revision,
        cache_dir=None if download_dir is None else str(local_path(download_dir)),
        allow_patterns=patterns,
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
            f"{error.strerror}; `nanovllm rm` deletes models, and download_dir names another place"
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
