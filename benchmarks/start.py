"""Compare how long engines take from the start of the process to the first token.

Each round starts each engine once, one after the other. An engine prints a line after each stage,
and this process notes when it arrives. Without --gguf only nanovllm is measured. Both engines must
have the same weights for the comparison to be fair.
"""

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from benchmarks.harness import Table, make_parser

NANOVLLM = """
import sys
print(flush=True)
from nanovllm import LLM, SamplingParams
print(flush=True)
llm = LLM(sys.argv[1], max_model_len=4096)
print(flush=True)
llm.generate([[5, 6, 7]], SamplingParams(max_tokens=1, temperature=0), use_tqdm=False)
print(flush=True)
"""
LLAMACPP = """
import os, sys
print(flush=True)
import llama_cpp as lib
print(flush=True)
lib.llama_backend_init()
model = lib.llama_model_load_from_file(sys.argv[1].encode(), lib.llama_model_default_params())
params = lib.llama_context_default_params()
params.n_ctx, params.n_threads = 4096, len(os.sched_getaffinity(0))
params.n_threads_batch = params.n_threads
context = lib.llama_init_from_model(model, params)
print(flush=True)
tokens = (lib.llama_token * 3)(5, 6, 7)
assert lib.llama_decode(context, lib.llama_batch_get_one(tokens, 3)) == 0
logits = lib.llama_get_logits_ith(context, -1)
size = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model))
max(range(size), key=logits[:size].__getitem__)
print(flush=True)
os._exit(0)
"""
STAGES = ("python", "import", "load", "first token")
COMMAND = ("first byte of nanovllm generate",)


def stages(command: list[str], names: tuple[str, ...], env: dict[str, str]) -> dict[str, float]:
    """Return the seconds from the start of `command` to each line that it prints, by stage."""
    start = time.perf_counter()
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=env
    ) as process:
        assert process.stdout is not None
        found = {}
        for name in names:
            if not process.stdout.read(1):
                sys.exit(f"start.py: {command[0]} ended before {name!r}")
            found[name] = time.perf_counter() - start
        process.stdout.read()
    return found


def forget(*files: str) -> None:
    """Drop files, or the weights in a directory, from the page cache."""
    if sys.platform != "linux":
        sys.exit("start.py: only Linux drops files from its cache")
    for path in map(Path, files):
        for file in path.glob("*.safetensors") if path.is_dir() else [path]:
            with file.open("rb") as opened:
                os.fsync(opened.fileno())
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def commands(args: argparse.Namespace) -> dict[str, tuple[list[str], tuple[str, ...]]]:
    """Return each engine's command, and the stages of its lines."""
    found: dict[str, tuple[list[str], tuple[str, ...]]]
    found = {"nanovllm": ([sys.executable, "-c", NANOVLLM, args.model], STAGES)}
    if args.command_line:
        line = [sys.executable, "-m", "nanovllm", "generate", args.model, "The sky is"]
        found["command line"] = ([*line, "--max-tokens", "1", "--temperature", "0"], COMMAND)
    if args.gguf:
        found["llama.cpp"] = ([args.llamacpp, "-c", LLAMACPP, args.gguf], STAGES)
    return found


def main(argv: list[str] | None = None) -> None:
    """Print a row for each stage and engine."""
    parser = make_parser("start", __doc__, model=False, rounds=5)
    parser.add_argument("--model", required=True, help="a checkpoint for nanovllm")
    parser.add_argument("--gguf", help="the same weights for llama.cpp")
    parser.add_argument("--llamacpp", default=sys.executable, help="Python with llama-cpp-python")
    parser.add_argument("--command-line", action="store_true", help="nanovllm generate as well")
    parser.add_argument("--cold", action="store_true", help="weights are not in the page cache")
    parser.add_argument("--first", action="store_true", help="nothing is kept from earlier starts")
    args = parser.parse_args(argv)
    engines = commands(args)
    times: dict[tuple[str, str], list[float]] = {}
    for _ in range(args.rounds):
        for engine, (command, names) in engines.items():
            if args.cold:
                forget(args.model, *filter(None, [args.gguf]))
            with contextlib.ExitStack() as stack:
                env = dict(os.environ)
                env.pop("PYTHONDONTWRITEBYTECODE", None)  # or everything is compiled at each start
                if args.first:
                    env["XDG_CACHE_HOME"] = stack.enter_context(tempfile.TemporaryDirectory())
                for stage, seconds in stages(command, names, env).items():
                    times.setdefault((stage, engine), []).append(seconds)
    table = Table("seconds to the end of", "engine", "median", "least", "most")
    for (stage, engine), found in times.items():
        table.row(stage, engine, *(f"{x:.2f}" for x in (median(found), min(found), max(found))))


if __name__ == "__main__":
    main()
