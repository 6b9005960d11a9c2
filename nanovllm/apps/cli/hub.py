"""`nanovllm show`: what a model of this machine is."""

import argparse
import datetime
from pathlib import Path
from typing import Any

from nanovllm.apps.cli.models import REFUSED, print_result, report_lines, size_text, table
from nanovllm.errors import CheckpointError
from nanovllm.loading.download import cached_revision, offline, plain_name
from nanovllm.loading.files import is_gguf, local_path
from nanovllm.loading.hub import open_checkpoint, weight_files
from nanovllm.options.flags import Parser
from nanovllm.options.model_names import tag_of


def _words(model: str) -> str:
    """Return a model as `hf download` takes it."""
    if tag := tag_of(model):
        return f"{tag[0]} --include '*{tag[1]}.gguf'"
    *id_parts, file = [*model.split("/", 2), "", ""][:3]
    return f"{'/'.join(id_parts).rstrip('/')} {file}".rstrip()


def add_show(commands: "argparse._SubParsersAction[Parser]") -> None:
    """Add `show` to the commands."""
    about = show.__doc__
    usage = "nanovllm show MODEL [--json]"
    parser = commands.add_parser("show", help=about, description=about, usage=usage)
    parser.set_defaults(command=show, parser=parser, takes="show takes one MODEL")
    about = (
        "A hub id, with :TAG or /FILE.gguf at its end for one GGUF file of several; or a directory "
        "or GGUF file."
    )
    parser.add_argument("model", metavar="MODEL", help=about)
    about = "Directory of the models. (default: huggingface_hub's cache)"
    parser.add_argument("--download-dir", metavar="TEXT", help=about)
    parser.add_argument("--json", action="store_true", help="Print JSON.")


def show(args: argparse.Namespace) -> int:
    """Show a cached model's path, type and memory."""
    from nanovllm.worker import model_report

    name = plain_name(args.model, args.download_dir)
    revision = None
    if not local_path(name).exists():
        revision = cached_revision(name, args.download_dir)
        if revision is None:
            raise CheckpointError(
                f"model {name!r} is not on this machine: `hf download {_words(name)}` gets it, and "
                "`hf cache ls` lists what is here"
            )
    with offline():
        checkpoint = open_checkpoint(name, revision, args.download_dir)
        path = checkpoint.path
        in_gguf = [] if is_gguf(path) else [*path.glob("*.gguf")]
        try:
            files = weight_files(checkpoint, name, revision, args.download_dir)
        except CheckpointError:
            if len(in_gguf) > 1:
                raise
            files = in_gguf
            path = in_gguf[0] if in_gguf else path
    report: dict[str, Any] = model_report.report(str(path)) if files else {}
    on_disk = _on_disk(path)
    size = sum(file.stat().st_size for file in on_disk)
    modified = max(file.stat().st_mtime for file in on_disk)
    if args.json:
        about = {"name": name, "revision": revision, "path": str(path), "size": size}
        print_result({**report, **about, "modified": modified, "is_whole": bool(files)})
    else:
        day = datetime.datetime.fromtimestamp(modified).astimezone().date().isoformat()
        rows = [("name", name), *([("revision", revision)] if revision else [])]
        rows += [("path", str(path)), ("on disk", f"{size_text(size)}, since {day}")]
        missing = [("weights", f"not here: `hf download {_words(name)}` gets them")]
        print_result(table([*rows, *(report_lines(report) if report else missing)]))
    return 0 if not report or report["supported"] else REFUSED


def _on_disk(path: Path) -> list[Path]:
    """Return the files of a model: a GGUF file, or those of a directory."""
    return [path] if is_gguf(path) else [file for file in path.rglob("*") if file.is_file()]
