"""`nanovllm prove`: whether a model's answers depend on how they are computed."""

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from nanovllm import demo_model
from nanovllm.apps.prove import ProveOptions
from nanovllm.options.config import Config
from nanovllm.options.flags import Subparsers, add_command, add_own_and_engine_flags, given_fields
from nanovllm.options.validation import check_place, writing
from nanovllm.utils.terminal import write

if TYPE_CHECKING:
    from nanovllm.apps.prove.proof import Verdict

DIFFERS = 1
"""The exit status where an answer depends on how it was computed."""
_MORE = (
    "Tokens and log-probabilities of some requests, each alone, are compared with those in "
    "batches, in chunks, from a warm cache, after preemption, with drafts, and so on. The exit "
    "status is 0 if all bits are equal, or 1; then the first difference is shown."
)


def add_prove(commands: Subparsers) -> None:
    """Add `prove` to the commands."""
    words = "[MODEL] [--full] [flags]"
    parser = add_command(commands, prove, words, "prove takes one MODEL", _MORE)
    parser.add_argument(
        "model",
        metavar="MODEL",
        nargs="?",
        help="A checkpoint directory, a GGUF file or a hub id. (default: as for generate)",
    )
    add_own_and_engine_flags(parser, {"prove": (ProveOptions, ())})


def prove(args: argparse.Namespace) -> int:
    """Check that a model's answers have the same bits however they are computed."""
    options = ProveOptions(**given_fields(ProveOptions, args))
    engine_options = {k: v for k, v in given_fields(Config, args).items() if k != "model"}
    if options.output is not None:
        check_place("output", options.output)
    model = args.model or demo_model.default_model()
    Config(model=model, **engine_options)
    from nanovllm.apps.prove.proof import Prover

    prover = Prover(model, engine_options, options, _show)
    write(f"{len(prover.requests)} requests, each alone and then:\n")
    proof = prover.prove()
    if proof.not_tried:
        write(f"not tried: {'; '.join(proof.not_tried)}\n")
    if options.output is not None:
        found = {"command": sys.argv[1:], **dataclasses.asdict(proof)}
        with writing("output", options.output):
            text = json.dumps(found, indent=1) + "\n"
            Path(options.output).write_text(text, encoding="utf-8")
    if proof.holds:
        proof.check_shown()
        write(
            f"{proof.engine}: in {proof.num_same} ways all tokens and log-probabilities are the "
            "same, bit for bit.\n"
        )
        return 0
    write(f"the first difference: {proof.difference}\n")
    return DIFFERS


def _show(verdict: "Verdict") -> None:
    name = f"{verdict.setting}, {verdict.way}".removeprefix(", ")
    status = verdict.status
    if verdict.num_different:
        status = f"{verdict.num_different} of {verdict.num_answers} differ"
        status += f", {verdict.num_different_tokens} in tokens"
    write(f"{name:34}{status:32}{verdict.evidence:42}{verdict.seconds:6.1f} s\n")
