"""The command line: `nanovllm generate` and `nanovllm chat`.

Each field of Config and SamplingParams is a flag.
"""

import argparse
import dataclasses
import json
import os
import sys
import types
import typing
from collections.abc import Callable, Collection, Iterable, Sequence as Seq
from typing import Any

from nanovllm import demo_model
from nanovllm.config import Config
from nanovllm.errors import InvalidRequestError, NanoVLLMError
from nanovllm.sampling_params import SamplingParams

if typing.TYPE_CHECKING:
    from nanovllm.llm import LLM

NO_FLAGS = ("logits_processors", "output_kind")
"""Fields whose values cannot be written on a command line."""
HELP = "/reset starts a new conversation, /exit (or Ctrl-D) quits, Ctrl-C stops an answer."


def main(argv: Seq[str] | None = None) -> int:
    """Run the command line and return the exit status."""
    parser = _parser()
    args, rest = parser.parse_known_args(argv)
    if rest and (args.command is not generate or any(word.startswith("-") for word in rest)):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:  # prompts after a flag: argparse itself does not accept them there
        args.prompt += rest
    try:
        command: Callable[[argparse.Namespace], int] = args.command
        status = command(args)
        sys.stdout.flush()
        return status
    except NanoVLLMError as error:
        sys.stderr.write(f"nanovllm: {error}\n")
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of a pipe has ended, such as `| head`
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())  # Python flushes it once more at exit
        return 141
    except UnicodeDecodeError as error:
        sys.stderr.write(f"nanovllm: standard input is not {error.encoding} text: {error}\n")
        return 2


def generate(args: argparse.Namespace) -> int:
    """Print the continuation of each prompt, from the arguments or the lines of standard input."""
    llm, params = _load(args)
    texts = args.prompt or [line.rstrip("\n") for line in sys.stdin if line.strip()]
    prompts: list[Any] = texts
    if args.chat:
        prompts = [
            llm.render([{"role": "user", "content": text}], add_generation_prompt=True)
            for text in texts
        ]
    if len(prompts) == 1 and params.n == 1 and not args.json:
        _write(output.text for output in llm.stream(prompts[0], params))
        return 0
    outputs = llm.generate(prompts, params, use_tqdm=sys.stderr.isatty())
    for text, output in zip(texts, outputs, strict=True):
        for completion in output.outputs:
            if args.json:
                record = {"prompt": text, **dataclasses.asdict(completion)}
                sys.stdout.write(json.dumps(record, ensure_ascii=False) + "\n")
            else:
                sys.stdout.write(completion.text + "\n")
    return 0


def chat(args: argparse.Namespace) -> int:
    """Chat with a model: read messages from standard input and stream the answers."""
    llm, params = _load(args)
    template = args.chat_template_kwargs
    if params.n > 1:
        raise InvalidRequestError(f"a conversation has one answer, so n must be 1, got {params.n}")
    system = [{"role": "system", "content": args.system}] if args.system else []
    history = list(system)
    interactive = sys.stdin.isatty()
    if interactive:
        sys.stdout.write(HELP + "\n")
    while True:
        try:
            line = input("> " if interactive else "").strip()
        except EOFError:
            return 0
        if line == "/exit":
            return 0
        if line == "/reset":
            history = list(system)
            continue
        if not line:
            continue
        question = {"role": "user", "content": line}
        try:
            prompt = llm.render([*history, question], add_generation_prompt=True, **template)
            answer = _write(output.text for output in llm.stream(prompt, params))
        except InvalidRequestError as error:
            sys.stderr.write(f"{error}\n(/reset starts a new conversation)\n")
            continue
        except KeyboardInterrupt:
            sys.stdout.write("\n")
            continue
        history += [question, {"role": "assistant", "content": answer}]


def _write(pieces: Iterable[str]) -> str:
    """Print pieces of text as they come and return the whole text."""
    text = ""
    for piece in pieces:
        sys.stdout.write(piece)
        sys.stdout.flush()
        text += piece
    sys.stdout.write("\n")
    return text


def _load(args: argparse.Namespace) -> "tuple[LLM, SamplingParams]":
    """Return the model and its recommended sampling parameters, overridden by the flags."""
    from nanovllm.llm import LLM

    given = vars(args)
    llm = LLM(**{name: given[name] for name in _fields(Config) if name in given})
    defaults = dataclasses.asdict(llm.get_default_sampling_params())
    if llm.engine.generation_config.get("max_new_tokens") is None:
        defaults["max_tokens"] = 512
    flags = {name: given[name] for name in _fields(SamplingParams) if name in given}
    return llm, SamplingParams(**{**defaults, **flags})


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="nanovllm", description="Run a language model.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in (generate, chat):
        sub = commands.add_parser(
            command.__name__, help=command.__doc__, description=command.__doc__
        )
        sub.set_defaults(command=command)
        sub.add_argument(
            "model",
            nargs="?" if command is chat else None,
            default=demo_model.MODEL,
            help="a checkpoint directory or a hub id"
            + ("; default: the glossary model that ships with nanovllm" if command is chat else ""),
        )
        if command is generate:
            sub.add_argument("prompt", nargs="*", help="default: the lines of standard input")
            sub.add_argument("--chat", action="store_true", help="apply the chat template")
            sub.add_argument("--json", action="store_true", help="print one JSON object per output")
        else:
            sub.add_argument("--system", help="a system message")
            sub.add_argument(
                "--chat-template-kwargs",
                default={},
                type=_json_object,
                metavar="JSON",
                help='arguments of the chat template, such as {"enable_thinking": false}',
            )
        _add_flags(sub.add_argument_group("engine"), Config, but={"model"})
        _add_flags(
            sub.add_argument_group("sampling"), SamplingParams, but={*_fields(Config), *NO_FLAGS}
        )
    return parser


def _add_flags(group: "argparse._ArgumentGroup", owner: type[Any], but: Collection[str]) -> None:
    """Add a flag for each field of `owner` except those in `but`.

    A flag that is not given sets no attribute. A field of both dataclasses, such as seed, has one
    flag, which sets both.
    """
    for name, (kind, default) in _fields(owner).items():
        if name in but:
            continue
        options: dict[str, Any] = {"default": argparse.SUPPRESS, "dest": name}
        if kind is bool:
            options["action"] = argparse.BooleanOptionalAction
        elif kind in (int, float, str):
            options |= {"type": kind, "metavar": kind.__name__.upper()}
        elif name in ("stop", "bad_words"):
            options |= {"action": "append", "metavar": "STR"}
        else:
            options |= {"type": json.loads, "metavar": "JSON"}
        group.add_argument(
            "--" + name.replace("_", "-"),
            help=f"default: {default!r}".replace("%", "%%"),
            **options,
        )


def _json_object(text: str) -> dict[str, Any]:
    value = json.loads(text)
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"not a JSON object: {text}")
    return value


def _fields(owner: type[Any]) -> dict[str, tuple[type[Any], Any]]:
    """Return (type without None, default) of each field, by name."""
    hints = typing.get_type_hints(owner)
    found = {}
    for field in dataclasses.fields(owner):
        hint = hints[field.name]
        if isinstance(hint, types.UnionType):
            (hint,) = (arg for arg in typing.get_args(hint) if arg is not type(None))
        found[field.name] = (hint, field.default)
    return found


if __name__ == "__main__":
    sys.exit(main())
