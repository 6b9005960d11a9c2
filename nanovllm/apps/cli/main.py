"""The command line: `nanovllm generate`, `chat`, `run`, `serve` and `explain`; with the other
commands.

Each field of Config and of SamplingParams is a flag. What can be checked without the model
is checked before it is loaded.
"""

import argparse
import contextlib
import dataclasses
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence as Seq
from typing import TYPE_CHECKING, Any

from nanovllm import demo_model
from nanovllm.apps.cli.arguments import EXPLAINED_TOKENS, parse
from nanovllm.apps.cli.repl import (
    AnswerPiece,
    Chat,
    Message,
    Source,
    awaited,
    model_source,
    pieces,
)
from nanovllm.apps.explain import ExplainOptions
from nanovllm.apps.router.router_options import RouterOptions, names_several
from nanovllm.apps.server.server_options import model_name
from nanovllm.chat.pictures import with_files
from nanovllm.errors import ConfigError, InvalidRequestError, NanoVLLMError, ServerError
from nanovllm.options.config import Config
from nanovllm.options.flags import MAX_TOKENS, Parser, fields_of, given_fields
from nanovllm.options.sampling_params import CHAT_SAMPLING, SamplingParams, chat_sampling
from nanovllm.options.validation import check_installed, check_place
from nanovllm.utils.terminal import (
    OutputError,
    abandon,
    check_text,
    complain,
    is_interactive,
    joined_lines,
    note,
    piped_lines,
    prepare_streams,
    typed_lines,
    write,
    write_stream,
)

if TYPE_CHECKING:
    from nanovllm.llm import LLM


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


def _parse(argv: Seq[str] | None) -> argparse.Namespace:
    return parse(argv, (generate, chat, run, serve, explain))


def generate(args: argparse.Namespace) -> int:
    """Print the continuation of each prompt, from the arguments or the lines of standard input."""
    options, flags = _checked(args)
    given = _prompts(args)
    llm, params = load(options, flags, is_named=args.names_model, is_chat=args.chat)
    tokenizer = llm.engine.input_processor.tokenizer
    if not args.chat and tokenizer is not None and tokenizer.chat_template:
        note("nanovllm: continuing the text as it is; with --chat the model answers it")
    prompts = _rendered(llm, given, args) if args.chat else given
    if len(prompts) == 1 and params.n == 1 and not args.json:
        write_stream(piece.text for piece in awaited(pieces(llm.stream(prompts[0], params))))
        return 0
    outputs = llm.generate(prompts, params, use_tqdm=sys.stderr.isatty())
    escaped = (sys.stdout.encoding or "utf-8").lower() != "utf-8"
    for text, output in zip(given, outputs, strict=True):
        for completion in output.outputs:
            if args.json:
                record = {"prompt": text, **dataclasses.asdict(completion)}
                del record["weight_versions"], record["routed_experts"]  # for trainers
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
    question = " ".join(getattr(args, "prompt", ()))
    if sys.stdin is None and not question:
        raise InvalidRequestError("standard input is closed, so there is nothing to answer")
    if args.url is not None:
        source = _connect(args, options, flags)
    else:
        llm, params = load(options, flags, is_named=args.names_model, is_chat=True)
        source = model_source(llm, params, args.chat_template_kwargs)
        source = _naming_flags(source, args.parser)
    conversation = Chat(source, args.system)
    for file in args.image:
        conversation.add_picture(file)
    if question:
        conversation.answer(check_text("the question", question))
    elif is_interactive():
        write("Type a message, or /help.\n")
        conversation.run(typed_lines(conversation.completions))
    else:
        conversation.run(joined_lines(piped_lines()))
    return 0


def run(args: argparse.Namespace) -> int:
    """Chat with a model by its name, which is downloaded first if it is not here."""
    return chat(args)


def serve(args: argparse.Namespace) -> int:
    """Serve a model over HTTP with OpenAI's API."""
    check_installed("server", "fastapi", "uvicorn")
    if names_several(args.models) or given_fields(RouterOptions, args):
        from nanovllm.apps.router import serve as router

        return router.serve(args)
    from nanovllm.apps.server import serve as server

    return server.serve(args)


def explain(args: argparse.Namespace) -> int:
    """Show step by step how the engine continues prompts, and why it does what it does."""
    chosen = ExplainOptions(**given_fields(ExplainOptions, args))
    options, flags = _checked(args)
    if not Config(**options).runs_in_process:
        raise ConfigError("explain runs the model in this process: leave tensor_parallel_size at 1")
    if chosen.html is not None:
        check_place("html", chosen.html)
    given = _prompts(args)
    flags = {"max_tokens": EXPLAINED_TOKENS, **flags}
    llm, params = load(options, flags, is_named=args.names_model, is_chat=args.chat)
    from nanovllm.apps.explain.explain import explain_prompts

    prompts = _rendered(llm, given, args) if args.chat else given
    explain_prompts(llm, shown_model(args.model), prompts, params, chosen)
    return 0


def _rendered(llm: "LLM", texts: list[str], args: argparse.Namespace) -> list[Any]:
    """Return the prompts of conversations that begin with these messages, and have pictures."""
    return [
        llm.engine.input_processor.render(
            [{"role": "user", "content": with_files(text, args.image)}],
            {"add_generation_prompt": True},
        )
        for text in texts
    ]


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
    """Return the answers of the server in --url, after asking which models it has."""
    engine = sorted(options.keys() - {"model", *fields_of(SamplingParams)})
    if engine:
        flag = engine[0].replace("_", "-")
        raise InvalidRequestError(f"--{flag} is for a model here; the server has its own options")
    check_installed("client", "httpx")
    from nanovllm.apps.cli import server_client

    server = server_client.find_server(args.url, args.api_key)
    card = {"id": args.model}
    with contextlib.suppress(ServerError) if args.model else contextlib.nullcontext():
        card = server_client.model_card(server, args.model)
    model = card["id"]
    if is_interactive():
        write(f"Talking to {model} at {server.base_url}\n")
    match card:
        case {"chat_sampling": {**sampling}}:
            flags = {**{key: sampling[key] for key in CHAT_SAMPLING if key in sampling}, **flags}
    if args.chat_template_kwargs:
        flags = {**flags, "chat_template_kwargs": args.chat_template_kwargs}
    return server_client.server_source(server, model, flags)


def _naming_flags(source: Source, parser: Parser) -> Source:
    """Return the same answers, with errors that name flags."""

    def answer(messages: list[Message]) -> Iterator[AnswerPiece]:
        with parser.errors_in_flags():
            yield from source(messages)

    return answer


def _prompts(args: argparse.Namespace) -> list[str]:
    if args.prompt and args.prompt != ["-"]:
        return [check_text(f"prompt {i}", text) for i, text in enumerate(args.prompt)]
    if is_interactive():
        complain(f"nanovllm: type prompts for {shown_model(args.model)}, one a line, then Ctrl-D")
    if given := [line for line in piped_lines() if line.strip()]:
        return given
    raise InvalidRequestError(
        f"there is no prompt for {shown_model(args.model)}: give one, as in "
        "nanovllm generate 'The sky is', or lines on standard input"
    )


def shown_model(model: str) -> str:
    """Return a model's name for messages."""
    if model == demo_model.MODEL:
        return "the glossary model that ships with nanovllm"
    return model_name(model)


def load(
    options: dict[str, Any], flags: dict[str, Any], *, is_named: bool, is_chat: bool
) -> "tuple[LLM, SamplingParams]":
    """Return the model and its recommended sampling parameters, overridden by the flags.

    Args:
        is_named: whether the user named the model; otherwise one line says which it is.
        is_chat: whether it answers messages; then `CHAT_SAMPLING` counts where the checkpoint
            recommends no sampling.
    """
    name = shown_model(options["model"])
    if is_named:
        note(f"nanovllm: loading {name}")
    else:
        complain(f"nanovllm: no MODEL is named, so {name} answers")
    try:
        from nanovllm.llm import LLM

        llm = LLM(**options)
    except KeyboardInterrupt:
        complain("nanovllm: interrupted while loading the model")
        raise
    recommended = llm.engine.generation_config
    params = llm.get_default_sampling_params()
    if is_chat and options.get("generation_config") != "vllm":
        params = dataclasses.replace(params, **_chat_sampling(recommended, flags))
    if recommended.get("max_new_tokens") is None:
        flags = {"max_tokens": MAX_TOKENS, **flags}
    return llm, dataclasses.replace(params, **flags)


def _chat_sampling(recommended: Mapping[str, Any], flags: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a chat samples with where the checkpoint does not decide; say so in a line."""
    found = chat_sampling(recommended)
    chosen = {name: value for name, value in found.items() if name not in flags}
    if chosen and flags.get("temperature") != 0:
        values = ", ".join(f"{name} {value}" for name, value in chosen.items())
        note(f"nanovllm: the model recommends no sampling, so a chat takes {values}")
    return chosen


if __name__ == "__main__":
    sys.exit(main())
