"""`nanovllm lab`: commands for those who write plugins."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanovllm import demo_model
from nanovllm.apps.cli.flag_groups import add_engine_flags
from nanovllm.apps.cli.prove import save_results
from nanovllm.apps.lab.lab_options import BenchOptions, CheckOptions
from nanovllm.apps.lab.new import KINDS, summary, write_plugin
from nanovllm.apps.lab.plugin import Plugin, find_plugin
from nanovllm.apps.prove.prove_options import ProveOptions
from nanovllm.errors import ConfigError
from nanovllm.options.config import Config
from nanovllm.options.flags import Parser, add_flags, add_other_flags, fields_of, given_fields
from nanovllm.options.validation import check_place, listed
from nanovllm.utils.progress import progress_bar
from nanovllm.utils.terminal import write

if TYPE_CHECKING:
    from nanovllm.apps.lab.check import Finding


def add_lab(commands: "argparse._SubParsersAction[Parser]") -> None:
    """Add `lab` to the commands, with its own commands."""
    about = "Write plugins: policies, eviction orders and so on."
    parser = commands.add_parser("lab", help=about, description=about)
    added = parser.add_subparsers(metavar="COMMAND", required=True)
    _add_new(added)
    _add_check(added)
    _add_bench(added)


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


def _add_check(commands: "argparse._SubParsersAction[Parser]") -> None:
    _add_trial(
        commands,
        check,
        "Check that an engine keeps every rule with a policy or an eviction order in place.",
        "The exit status is 0 if all rules are kept, or 1.",
        {
            "check": (CheckOptions, set()),
            "the ways of nanovllm prove": (ProveOptions, {"output", "lora_modules"}),
        },
    )


def _add_bench(commands: "argparse._SubParsersAction[Parser]") -> None:
    _add_trial(
        commands,
        bench,
        "Measure an engine with a policy or an eviction order beside the default.",
        "Without PLUGIN the default is measured beside itself.",
        {"bench": (BenchOptions, set())},
        needs_plugin=False,
    )


def _add_trial(
    commands: "argparse._SubParsersAction[Parser]",
    run: Callable[[argparse.Namespace], int],
    about: str,
    more: str,
    groups: dict[str, tuple[type, set[str]]],
    *,
    needs_plugin: bool = True,
) -> None:
    """Add a command that runs engines with a plugin.

    Args:
        groups: of flags, by title: the class of their fields, and those that are left out.
    """
    name = run.__name__
    plugin = "PLUGIN" if needs_plugin else "[PLUGIN]"
    parser = commands.add_parser(
        name,
        help=about,
        description=about,
        epilog=more,
        usage=f"nanovllm lab {name} {plugin} [MODEL] [flags]",
    )
    takes = f"lab {name} takes a PLUGIN and a MODEL"
    parser.set_defaults(command=run, parser=parser, takes=takes)
    parser.add_argument(
        "plugin",
        metavar="PLUGIN",
        nargs=None if needs_plugin else "?",
        help="A policy or an eviction order, as module:Class.",
    )
    parser.add_argument(
        "model",
        metavar="MODEL",
        nargs="?",
        default=demo_model.MODEL,
        help="A checkpoint directory, a GGUF file or a hub id. (default: the shipped model)",
    )
    for title, (fields, left_out) in groups.items():
        add_flags(parser.add_argument_group(title), fields, but=left_out, defaults={})
    own = [name for owner, but in groups.values() for name in fields_of(owner) if name not in but]
    add_engine_flags(parser)
    add_other_flags(parser, default=argparse.SUPPRESS)
    parser.shorten_help(own)


def _engine_options(args: argparse.Namespace, plugin: Plugin | None) -> dict[str, Any]:
    options = {k: v for k, v in given_fields(Config, args).items() if k != "model"}
    if plugin is not None and plugin.kind in options:
        flag = plugin.kind.replace("_", "-")
        raise ConfigError(f"--{flag} is PLUGIN: leave it out")
    Config(model=args.model, **options)
    return options


def check(args: argparse.Namespace) -> int:
    """Check that an engine keeps every rule with a plugin in place."""
    from nanovllm.apps.lab.check import check as run_checks

    plugin = find_plugin(args.plugin)
    options = _engine_options(args, plugin)
    how = CheckOptions(**given_fields(CheckOptions, args))
    prove = ProveOptions(**given_fields(ProveOptions, args))
    prove.check_places()
    found = run_checks(plugin, args.model, options, how, prove, _show)
    num_broken = sum(not finding.holds for finding in found)
    name = f"{plugin.kind} {plugin.value}"
    if num_broken:
        write(f"{name} breaks rules: {num_broken} of {len(found)} tried.\n")
        return 1
    write(f"{name} keeps all {len(found)} rules.\n")
    return 0


def bench(args: argparse.Namespace) -> int:
    """Measure an engine with a plugin beside the default."""
    from nanovllm.apps.lab import bench as lab

    plugin = None if args.plugin is None else find_plugin(args.plugin)
    options = _engine_options(args, plugin)
    how = BenchOptions(**given_fields(BenchOptions, args))
    if how.output is not None:
        check_place("output", how.output)
    with progress_bar(total=lab.num_steps(how), shown=True) as bar:
        found = lab.bench(plugin, args.model, options, how, bar.update)
    for line in lab.show(found):
        write(f"{line}\n")
    if how.output is not None:
        save_results(how.output, found.as_json())
    return 0


def _show(finding: "Finding") -> None:
    words, *calls = finding.words.splitlines()
    status = "holds" if finding.holds else "FAILS"
    write(f"{finding.name:40}{status:7}{finding.seconds:6.1f} s  {words}\n")
    for call in calls:
        write(f"    {call}\n")


def new(args: argparse.Namespace) -> int:
    """Write a file with a minimal plugin."""
    path = write_plugin(args.kind, args.name, Path())
    write(f"{path}: {summary(path)}\n")
    return 0
