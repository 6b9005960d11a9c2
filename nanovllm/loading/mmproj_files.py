"""Finds the mmproj file that belongs to a GGUF file, here or on the hub, by its name.

Reads no file. Imports no torch.
"""

import logging
import re
from collections.abc import Callable, Iterable
from pathlib import Path, PurePosixPath
from typing import Any

from nanovllm.errors import CheckpointError, ConfigError
from nanovllm.loading.download import download, hub_files, plain_name
from nanovllm.loading.files import check_file, is_gguf, is_mmproj, local_path
from nanovllm.loading.mmproj import can_see
from nanovllm.options.config import Config
from nanovllm.options.validation import shown

logger = logging.getLogger(__name__)

_TYPES = ("bf16", "f16", "f32", "q8_0")
"""What goes first of several files."""
_TYPE = re.compile(r"[-_.]((?:bf|f|i?q)\d+\w*)$")
"""What the name of a file says of the type of its numbers."""


def find_mmproj(
    config: Config,
    model: Path,
    architecture: Any,
    find: Callable[[str, str | None, str | None], Path | None],
) -> Path | None:
    """Return the GGUF file that reads pictures for `model`: that of the option, or the one beside
    it. None: there is none, or none is wanted.

    Args:
        architecture: llama.cpp's name, if `model` is a GGUF file.
        find: finds the file of a name, of a revision, in the directory of downloads.

    Raises:
        CheckpointError: there is no such file, or two names are as good.
        ConfigError: the option is for GGUF files.
    """
    if not is_gguf(model):
        raise ConfigError(
            f"mmproj {config.mmproj!r} is for a model in a GGUF file, and {model} is none: leave "
            "it out, a directory has all that reads pictures"
        )
    if (config.limit_mm_per_prompt or {}).get("image") == 0:
        return None
    if config.mmproj is None:
        return _find_beside(config, model) if can_see(architecture) else None
    name = plain_name(config.mmproj, config.download_dir)
    found = find(name, config.revision, config.download_dir)
    if found is None:
        raise CheckpointError(f"mmproj {config.mmproj!r} must be the name of a GGUF file")
    return found


def _find_beside(config: Config, model: Path) -> Path | None:
    """Return the mmproj file beside GGUF file `model`; download it if that comes from the hub."""
    name = plain_name(config.model, config.download_dir)
    is_local = local_path(name).exists()
    snapshots = (folder for folder in model.parents if folder.parent.name == "snapshots")
    root = model.parent if is_local else next(snapshots)
    inside = PurePosixPath(model.relative_to(root).as_posix())
    files = root.glob("*.gguf") if is_local else root.rglob("*.gguf")
    here = [file.relative_to(root).as_posix() for file in files]
    found = _best_beside(inside, here, is_local=is_local)
    if found is None and not is_local:
        repo = "/".join(name.partition(":")[0].split("/")[:2])
        found = _best_beside(inside, hub_files(repo, config.revision), is_local=False)
        if found is not None:
            download(repo, config.revision, [found], config.download_dir)
    if found is None:
        return None
    logger.info("%s reads pictures for %s", found, model.name)
    if not check_file(root, found):
        raise CheckpointError(f"{root}: {shown(found)} is a link to a missing file")
    return root / found


def _best_beside(model: PurePosixPath, names: Iterable[str], *, is_local: bool) -> str | None:
    """Return the mmproj file in the folder of `model`, or in one above it; None: there is none."""
    paths = [path for path in map(PurePosixPath, names) if path.suffix == ".gguf"]
    for folder in model.parents:
        own = [path.name for path in paths if path.parent == folder]
        is_one = not is_local or len([name for name in own if not is_mmproj(name)]) < 2
        if (found := best_name(model.name, own, is_one=is_one)) is not None:
            return str(folder / found)
    return None


def best_name(model: str, names: Iterable[str], *, is_one: bool) -> str | None:
    """Return the name of the mmproj file for `model` among those of its folder; None: none is.

    Such a name has "mmproj" in it. One with the model's own name counts before one without any, as
    mmproj-F16.gguf and mmproj-model-f16.gguf. Of several BF16 goes first, then F16.

    Args:
        is_one: whether all files are of one model: then names of others count, too.

    Raises:
        CheckpointError: two names are as good.
    """
    by_rank: dict[tuple[int, int], list[str]] = {}
    for name in sorted(names):
        before, mmproj, after = name.lower().removesuffix(".gguf").partition("mmproj")
        found = _TYPE.search(after)
        kind = found[1] if found else ""
        base = (before + after.removesuffix(found[0] if found else "")).strip("-_.")
        order = _TYPES.index(kind) if kind in _TYPES else len(_TYPES)
        if base in ("", "model"):
            rank = 0
        elif model.lower().startswith(base):
            rank = -len(base)
        else:
            rank = 1
        if mmproj and (rank < 1 or is_one):
            by_rank.setdefault((rank, order), []).append(name)
    if not by_rank:
        return None
    best, *others = by_rank[min(by_rank)]
    if others:
        raise CheckpointError(
            f"{best} and {', '.join(others)} may each read pictures for {model}: name one in the "
            'option mmproj, or start with limit_mm_per_prompt={"image": 0}'
        )
    return best
