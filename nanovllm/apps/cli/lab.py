"""`nanovllm lab`: commands for those who write plugins."""

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from nanovllm import demo_model
from nanovllm.apps.lab.new import KINDS, summary, write_plugin
from nanovllm.apps.lab.plugin import CheckOptions, find_plugin
from nanovllm.apps.plan.options import CalibrateOptions, MadeRequests, Objective, PlanOptions
from nanovllm.apps.prove import ProveOptions
from nanovllm.errors import ConfigError
from nanovllm.options.config import Config
from nanovllm.options.flags import (
    Subparsers,
    add_command,
    add_flags,
    add_own_and_engine_flags,
    given_fields,
)
from nanovllm.options.validation import check_installed, check_place, listed, writing
from nanovllm.utils.terminal import write

if TYPE_CHECKING:
    from tqdm import tqdm

    from nanovllm.apps.lab.check import Finding

_NOT_OF_PROVE = {"output", "lora_modules"}
"""Options of `nanovllm prove` that a check does not take."""


def add_lab(commands: Subparsers) -> None:
    """Add `lab` to the commands, with its own commands."""
    about = "Write plugins: policies, eviction orders and so on."
    parser = commands.add_parser("lab", help=about, description=about)
    added = parser.add_subparsers(metavar="COMMAND", required=True)
    _add_new(added)
    _add_check(added)
    _add_calibrate(added)
    _add_plan(added)


def _add_new(commands: Subparsers) -> None:
    takes = "lab new takes one KIND and one NAME"
    parser = add_command(commands, new, "KIND [NAME]", takes)
    parser.add_argument("kind", metavar="KIND", help=f"One of {listed(KINDS, len(KINDS))}.")
    parser.add_argument(
        "name",
        metavar="NAME",
        nargs="?",
        help="The name of the new module, such as shortest_first. (default: my_KIND)",
    )


def _add_check(commands: Subparsers) -> None:
    parser = add_command(
        commands,
        check,
        "PLUGIN [MODEL] [flags]",
        "lab check takes a PLUGIN and a MODEL",
        "The exit status is 0 if all rules are kept, or 1.",
    )
    parser.add_argument(
        "plugin", metavar="PLUGIN", help="A policy or an eviction order, as module:Class."
    )
    parser.add_argument(
        "model",
        metavar="MODEL",
        nargs="?",
        default=demo_model.MODEL,
        help="A checkpoint directory, a GGUF file or a hub id. (default: the shipped model)",
    )
    groups = {
        "check": (CheckOptions, set[str]()),
        "the ways of nanovllm prove": (ProveOptions, _NOT_OF_PROVE),
    }
    add_own_and_engine_flags(parser, groups)


def _add_calibrate(commands: Subparsers) -> None:
    parser = add_command(commands, calibrate, "MODEL [flags]", "lab calibrate takes one MODEL")
    parser.add_argument(
        "model", metavar="MODEL", help="A checkpoint directory, a GGUF file or a hub id."
    )
    add_own_and_engine_flags(parser, {"calibrate": (CalibrateOptions, set[str]())})


def _add_plan(commands: Subparsers) -> None:
    parser = add_command(commands, plan, "[flags]", "lab plan takes flags alone")
    add_flags(parser.add_argument_group("plan"), PlanOptions)
    add_flags(parser.add_argument_group("the objective"), Objective)
    add_flags(parser.add_argument_group("requests, where there is no trace"), MadeRequests)


def calibrate(args: argparse.Namespace) -> int:
    """Measure an engine's steps on this machine, for `nanovllm lab plan`."""
    check_installed("lab", "pydantic", "scipy")
    from nanovllm.apps.plan.calibrate import calibrate as measured

    how = CalibrateOptions(**given_fields(CalibrateOptions, args))
    check_place("output", how.output)
    with _progress() as progress:
        cost = measured(Config(**given_fields(Config, args)), how.seconds, progress.set_description)
    with writing("output", how.output):
        cost.save(Path(how.output))
    median, high = cost.error
    write(
        f"{how.output}: {cost.source}. Of those held out, half are off by {median:.1%} or less, "
        f"nine of ten by {high:.1%}. What else runs on the machine counts as the engine's.\n"
    )
    return 0


def plan(args: argparse.Namespace) -> int:
    """Say what users would feel: an engine's scheduler in virtual time, on many replicas."""
    check_installed("lab", "pydantic", "scipy", "matplotlib")
    from nanovllm.apps.plan.plan import plan as run_plan
    from nanovllm.apps.plan.report import page, table

    how = PlanOptions(**given_fields(PlanOptions, args))
    objective = Objective(**given_fields(Objective, args))
    requests = MadeRequests(**given_fields(MadeRequests, args))
    for name in ("output", "page"):
        if (path := getattr(how, name)) is not None:
            check_place(name, path)
    with _progress() as progress:
        outcomes = run_plan(how, requests, objective, progress.set_description)
    write(table(outcomes, objective))
    if how.output is not None:
        with writing("output", how.output):
            Path(how.output).write_text(json.dumps(outcomes, indent=1) + "\n", encoding="utf-8")
    if how.page is not None:
        with writing("page", how.page):
            Path(how.page).write_text(page(outcomes, objective), encoding="utf-8")
    return 0 if any(outcome["meets_slo"] for outcome in outcomes) else 1


def _progress() -> "tqdm[NoReturn]":
    """Return a line of standard error, if somebody reads it, that says how far a command is."""
    from tqdm import tqdm

    return tqdm(bar_format="{desc}", leave=False, disable=None)


def check(args: argparse.Namespace) -> int:
    """Check that an engine keeps every rule with a policy or an eviction order in place."""
    from nanovllm.apps.lab.check import check as run_checks

    plugin = find_plugin(args.plugin)
    options = {k: v for k, v in given_fields(Config, args).items() if k != "model"}
    if plugin.kind in options:
        flag = plugin.kind.replace("_", "-")
        raise ConfigError(f"--{flag} is PLUGIN: leave it out")
    Config(model=args.model, **options)
    how = CheckOptions(**given_fields(CheckOptions, args))
    prove = ProveOptions(**given_fields(ProveOptions, args))
    found = run_checks(plugin, args.model, options, how, prove, _show)
    num_broken = sum(not finding.holds for finding in found)
    name = f"{plugin.kind} {plugin.value}"
    if num_broken:
        write(f"{name} breaks rules: {num_broken} of {len(found)} tried.\n")
        return 1
    write(f"{name} keeps all {len(found)} rules.\n")
    return 0


def _show(finding: "Finding") -> None:
    words, *calls = finding.words.splitlines()
    status = "holds" if finding.holds else "FAILS"
    write(f"{finding.name:40}{status:7}{finding.seconds:6.1f} s  {words}\n")
    for call in calls:
        write(f"    {call}\n")


def new(args: argparse.Namespace) -> int:
    """Write a file with a minimal plugin, which works as it is and explains itself."""
    path = write_plugin(args.kind, args.name, Path())
    write(f"{path}: {summary(path)}\n")
    return 0
