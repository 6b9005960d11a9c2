"""`nanovllm models`: the supported architectures, or what nanovllm makes of a checkpoint."""

import argparse
import json
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from nanovllm.options.flags import Parser
from nanovllm.utils.terminal import write

_MIN_WIDTH = 80
REFUSED = 1
"""The exit status where the model is not supported."""


def add_models(commands: "argparse._SubParsersAction[Parser]") -> None:
    """Add `models` to the commands."""
    about = "List the supported architectures, or tell what a checkpoint's config.json asks for."
    parser = commands.add_parser(
        "models", help=about, description=about, usage="nanovllm models [MODEL] [--json]"
    )
    parser.set_defaults(command=models, parser=parser, takes="models takes one MODEL")
    about = (
        "A checkpoint directory, a GGUF file or a hub id. Reads its config.json and the headers of "
        "its weights alone. (default: list the supported architectures)"
    )
    parser.add_argument("model", metavar="MODEL", nargs="?", help=about)
    parser.add_argument("--json", action="store_true", help="Print JSON.")


def models(args: argparse.Namespace) -> int:
    """List the supported architectures, or tell what a checkpoint's config.json asks for."""
    from nanovllm.worker import model_report

    if args.model is None:
        rows = model_report.all_supported()
        lines = [(row["architecture"], f"{row['models']}: {row['layers']}") for row in rows]
        print_result(rows if args.json else table(lines))
        return 0
    found = model_report.report(args.model)
    print_result(found if args.json else table(report_lines(found)))
    return 0 if found["supported"] else REFUSED


def print_result(found: Any) -> None:
    text = found if isinstance(found, str) else json.dumps(found, indent=2)
    write(text + "\n")


def table(rows: Iterable[tuple[str, str]]) -> str:
    """Return two columns. At a terminal the second one is wrapped."""
    rows = list(rows)
    first = max(len(name) for name, _ in rows) + 2
    width = max(shutil.get_terminal_size().columns, _MIN_WIDTH) - first
    lines = []
    for name, text in rows:
        wrapped = textwrap.wrap(text, width) if sys.stdout.isatty() else [text]
        lines += [f"{name:{first}}{wrapped[0]}", *(" " * first + line for line in wrapped[1:])]
    return "\n".join(lines)


def report_lines(found: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the rows of the report."""
    yield "architecture", found["architecture"]
    if not found["supported"]:
        yield "supported", f"no: {found['error']}"
        return
    yield "supported", f"yes, as {found['models']}"
    stored = f", weights in {found['quantization']}" if found["quantization"] else ""
    yield "dtype", f"{found['dtype']}{stored}"
    for form, count in found["stored"].items():
        yield "in few bits", f"{_count(count, 'linear')} in {form}"
    tied = ", head tied to the embedding" if found["tied"] else ""
    yield (
        "sizes",
        f"{_count(found['num_layers'], 'layer')}, hidden size {found['hidden_size']}, vocabulary "
        f"{found['vocab_size']}{tied}, up to {found['positions']} positions",
    )
    yield from _several("attention", found["attention"], _attention)
    yield from _several("state", found["states"], _state)
    yield from _several("MLP", found["mlps"], _mlp)
    if found["logit_softcap"]:
        yield "logits", f"soft cap {found['logit_softcap']:g}"
    yield "left out", ", ".join(found["left_out"]) or "nothing"
    memory = found["memory"]
    yield (
        "weights",
        f"{size_text(memory['weights_bytes'])} as stored, by its {memory['weights_from']}",
    )
    for form in ("int8", "int4"):
        if memory[f"{form}_bytes"] is not None:
            yield f"as {form}", size_text(memory[f"{form}_bytes"])
        elif not found["quantization"]:
            yield f"as {form}", "not possible: a layer's inputs are not a multiple of 32"
    window = ""
    if memory["kv_window_bytes"]:
        window = f", and {size_text(memory['kv_window_bytes'])} a sequence for windows"
    yield "KV cache", f"{size_text(memory['kv_token_bytes'])} a token{window}"
    if memory["state_bytes"]:
        yield "state", f"{size_text(memory['state_bytes'])} a sequence"
    yield "4 GiB of KV", f"a text of {memory['pool_tokens']} tokens"


def _several(
    name: str, found: list[dict[str, Any]], words: Callable[[dict[str, Any]], Iterable[str]]
) -> Iterator[tuple[str, str]]:
    for row in found:
        yield name, f"{_count(row['num_layers'], 'layer')}: {', '.join(words(row))}"
        name = ""


def _attention(row: dict[str, Any]) -> Iterator[str]:
    yield f"window of {row['window']} tokens" if row["window"] else "all tokens"
    if not row["causal"]:
        yield "in both directions"
    yield f"{_count(row['heads'], 'head')} of {row['head_dim']}"
    if row["value_dim"]:
        yield f"latents of {row['value_dim']} for all heads"
    else:
        yield _count(row["kv_heads"], "KV head") if row["own_kv"] else "KV of an earlier layer"
    if row["qk_norm"]:
        yield "norms of queries and keys"
    if row["rope"] is None:
        yield "no rotation"
    else:
        share = f" of {row['rope_share']:.0%} of a head" if row["rope_share"] != 1 else ""
        factor = f", factor {row['rope_factor']:g}" if row["rope_factor"] != 1 else ""
        yield f"rope {row['rope']}{share} (theta {row['rope_theta']:.12g}{factor})"
    if row["scale"] is not None:
        yield f"scores times {row['scale']:.4g}"
    if row["softcap"]:
        yield f"soft cap {row['softcap']:g}"
    if row["sinks"]:
        yield "sinks"


def _state(row: dict[str, Any]) -> Iterator[str]:
    yield row["kind"]
    for count, shape, dtype in row["parts"]:
        yield f"{f'{count} of ' if count > 1 else ''}{' x '.join(map(str, shape))} in {dtype}"


def _mlp(row: dict[str, Any]) -> Iterator[str]:
    yield str(row["activation"])
    if row["size"]:
        yield f"size {row['size']}"
    if row["experts"]:
        yield f"{row['experts']} experts of size {row['expert_size']}"
        yield f"{row['experts_per_token']} of them a token"
    if row["shared"]:
        yield f"one of size {row['shared']} for all tokens"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"


def size_text(num_bytes: int) -> str:
    """Return bytes in the unit that leaves one to four digits before the point."""
    size = float(num_bytes)
    unit = "bytes"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size /= 1024
        unit = larger
    return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.2f} {unit}"
