"""`nanovllm lab`: commands for those who write plugins."""

import argparse
from pathlib import Path

from nanovllm.apps.lab.new import KINDS, summary, write_plugin
from nanovllm.options.flags import Parser
from nanovllm.options.validation import listed
from nanovllm.utils.terminal import write


def add_lab(commands: "argparse._SubParsersAction[Parser]") -> None:
    """Add `lab` to the commands, with its own commands."""
    about = "Write plugins: policies, eviction orders and so on."
    parser = commands.add_parser("lab", help=about, description=about)
    added = parser.add_subparsers(metavar="COMMAND", required=True)
    _add_new(added)


def _add_new(commands: "argparse._SubParsersAction[Parser]") -> None:
    about = "Write a file with a minimal plugin, which works as it is and explains itself."
    parser = commands.add_parser(
        "new", help=about, description=about, usage="nanovllm lab new KIND [NAME]"
    )
    parser.set_defaults(command=new, parser=parser, takes="lab new takes one KIND and one NAME")
    parser.add_argument("kind", metavar="KIND", help=f"One of {listed(KINDS, len(KINDS))}.")
    parser.add_argument(
        "name",
        metavar="NAME",
        nargs="?",
        help="The name of the new module, such as shortest_first. (default: my_KIND)",
    )


def new(args: argparse.Namespace) -> int:
    """Write a file with a minimal plugin."""
    path = write_plugin(args.kind, args.name, Path())
    write(f"{path}: {summary(path)}\n")
    return 0
