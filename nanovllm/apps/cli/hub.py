"""`nanovllm pull`, `list`, `show` and `rm`: the models of huggingface_hub's cache, by name."""

import argparse
import datetime
from collections.abc import Callable, Sequence as Seq
from typing import Any

from nanovllm.apps.cli.models import REFUSED, print_result, report_lines, size_text, table
from nanovllm.errors import CheckpointError
from nanovllm.loading.files import local_path
from nanovllm.loading.hub_cache import (
    CachedModel,
    cached_models,
    find_model,
    pull as pull_model,
    remove,
)
from nanovllm.options.flags import Parser
from nanovllm.utils.progress import shows_progress
from nanovllm.utils.terminal import complain, write

_NAME = "A hub id, with :TAG or /FILE.gguf at its end for one GGUF file of several."


def add_hub_commands(commands: "argparse._SubParsersAction[Parser]") -> None:
    """Add `pull`, `list`, `show` and `rm` to the commands."""
    parser = _add(commands, pull, "MODEL")
    parser.add_argument("--revision", metavar="TEXT", help="Commit, branch or tag. (default: main)")
    for command, words in ((list_models, ""), (show, "MODEL [--json]"), (rm, "MODEL ...")):
        parser = _add(commands, command, words)
        if command is not rm:
            parser.add_argument("--json", action="store_true", help="Print JSON.")


def _add(
    commands: "argparse._SubParsersAction[Parser]",
    command: Callable[[argparse.Namespace], int],
    words: str,
) -> Parser:
    name = command.__name__.removesuffix("_models")
    about = command.__doc__
    usage = f"nanovllm {name} {words}".rstrip()
    parser = commands.add_parser(name, help=about, description=about, usage=usage)
    takes = f"{name} takes {'one MODEL' if words else 'no MODEL'}"
    parser.set_defaults(command=command, parser=parser, takes=takes)
    if words:
        nargs = "+" if command is rm else None
        parser.add_argument("model", metavar="MODEL", nargs=nargs, help=_NAME)
    about = "Directory of the models. (default: huggingface_hub's cache)"
    parser.add_argument("--download-dir", metavar="TEXT", help=about)
    return parser


def pull(args: argparse.Namespace) -> int:
    """Download a model from the hub, and check it; what is here already is only checked."""
    _pull(args.model, args.revision, args.download_dir)
    return 0


def pull_if_absent(model: str, revision: str | None, download_dir: str | None) -> None:
    """Pull a model that is neither a path on this machine nor in the cache.

    Raises:
        CheckpointError: as for `pull`.
    """
    if local_path(model).exists():
        return
    try:
        is_here = find_model(model, download_dir).is_whole
    except CheckpointError:
        is_here = False
    if not is_here:
        _pull(model, revision, download_dir)


def _pull(model: str, revision: str | None, download_dir: str | None) -> None:
    if not shows_progress():
        from huggingface_hub.utils import disable_progress_bars  # type: ignore[attr-defined]

        disable_progress_bars()
    found = pull_model(model, revision, download_dir)
    complain(f"nanovllm: {found.name} is here and checked: {size_text(found.size)} in {found.path}")


def list_models(args: argparse.Namespace) -> int:
    """List the models on this machine: name, size on the disk, and the day they came."""
    found = cached_models(args.download_dir)
    if args.json:
        print_result([_fields(model) for model in found])
    elif not found:
        complain("nanovllm: no models are here yet: `nanovllm pull OWNER/NAME` gets one")
    else:
        width = max(len(model.name) for model in found) + 2
        for model in found:
            note = "" if model.is_whole else "  without weights: pull it"
            write(f"{model.name:{width}}{size_text(model.size):>10}  {_day(model)}{note}\n")
    return 0


def show(args: argparse.Namespace) -> int:
    """Tell where a model of this machine lies, what it is, and the memory that it takes."""
    from nanovllm.worker import model_report

    found = find_model(args.model, args.download_dir)
    report: dict[str, Any] = {}
    if found.is_whole:
        report = model_report.report(str(found.path))
    if args.json:
        print_result({**report, **_fields(found)})
    else:
        rows = [
            ("name", found.name),
            ("revision", found.revision),
            ("path", str(found.path)),
            ("on disk", f"{size_text(found.size)}, since {_day(found)}"),
        ]
        missing = [("weights", f"not here: `nanovllm pull {found.name}` gets them")]
        print_result(table([*rows, *(report_lines(report) if report else missing)]))
    return 0 if not report or report["supported"] else REFUSED


def rm(args: argparse.Namespace) -> int:
    """Delete models from this machine."""
    names: Seq[str] = args.model
    for name in dict.fromkeys(names):
        freed = remove(name, args.download_dir)
        complain(f"nanovllm: {name} is deleted: {size_text(freed)} are free")
    return 0


def _fields(model: CachedModel) -> dict[str, Any]:
    return {**model._asdict(), "path": str(model.path)}


def _day(model: CachedModel) -> str:
    return datetime.datetime.fromtimestamp(model.modified).astimezone().date().isoformat()
