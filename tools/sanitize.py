"""Runs the C kernels under AddressSanitizer, UndefinedBehaviorSanitizer and ThreadSanitizer: their
tests, and small engines. A planted fault shows that each of them sees what it is there for.

    python -m tools.sanitize [address | undefined | thread]
"""

import ctypes
import os
import subprocess
import sys
import tempfile
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FLAGS = {
    "address": "-fsanitize=address -fsanitize-recover=address",
    "undefined": "-fsanitize=undefined -fsanitize=float-cast-overflow",
    "thread": "-fsanitize=thread",
}
LIBRARIES = {"address": "libasan.so", "undefined": "libubsan.so", "thread": "libtsan.so"}
OPTIONS = {
    "address": "detect_leaks=0:halt_on_error=0:alloc_dealloc_mismatch=0",
    "undefined": "print_stacktrace=1",
    "thread": "die_after_fork=0:halt_on_error=0:exitcode=0:ignore_noninstrumented_modules=1",
}
TESTS = ("test_ops", "test_paged_attention", "test_lora_ops", "test_state", "test_experts")
FAMILIES = ("qwen3", "gemma3_text", "gpt_oss", "qwen3_moe", "qwen3_5_text", "olmo3", "llama")
ENGINES = [
    (family, rounding)
    for number, family in enumerate(FAMILIES)
    for rounding in ((None, "int4"), ("int8", "w8a8"))[number % 2]
]
"""Families and roundings of the engines. ThreadSanitizer runs those that round nothing: a thread
rounds a single row for itself before it asks for work. One that is late then reads what the next
call may already write, gets no work, and drops what it read."""
PLANTED = """
#include <pthread.h>
#include <stdlib.h>
static int shared;
static void *add(void *unused) { for (int i = 0; i < 9999; i++) shared++; return unused; }
int address(int n) { volatile char *x = malloc(n); return x[n]; }
int undefined(int n) { volatile int x = 0x7fffffff; return x + n; }
int thread(int n) {
    pthread_t other;
    pthread_create(&other, 0, add, 0);
    add(0);
    pthread_join(other, 0);
    return n;
}
"""


def sanitize(kind: str, place: Path) -> list[str]:
    """Return what is wrong: reports of the sanitizer, runs that failed, a fault it did not see."""
    compiler = place / "compiler"
    compiler.write_text(
        f'#!/bin/sh\nexec gcc "$@" -O1 -g -w -fno-omit-frame-pointer {FLAGS[kind]}\n'
    )
    compiler.chmod(0o700)
    found = subprocess.run(
        ["gcc", f"-print-file-name={LIBRARIES[kind]}"], capture_output=True, text=True, check=True
    )
    log = place / "log"
    name = {"address": "ASAN", "undefined": "UBSAN", "thread": "TSAN"}[kind]
    environment = {
        **os.environ,
        "CC": str(compiler),
        "KERNELS": "native",
        "XDG_CACHE_HOME": str(place),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "2",
        "OMP_WAIT_POLICY": "passive",
        f"{name}_OPTIONS": f"{OPTIONS[kind]}:log_path={log}",
    }
    # Only what runs the kernels: make's programs would take minutes under it.
    run = ["setarch", "-R", "env", f"LD_PRELOAD={found.stdout.strip()}", sys.executable]
    run += ["-m", "tools.sanitize"]
    tests = [f"tests/kernels/cpu/{test}.py" for test in TESTS]
    wrong = []
    for command in (
        ["--planted", kind],
        ["--engines", kind],
        ["--tests", *tests],
    ):
        done = subprocess.run([*run, *command], cwd=ROOT, env=environment)
        reports = [file.read_text() for file in place.glob("log*")]
        for file in place.glob("log*"):
            file.unlink()
        if done.returncode:
            wrong.append(f"{' '.join(command)} ended with {done.returncode}")
        if "--planted" in command:
            wrong += [] if reports else [f"the {kind} sanitizer does not see a planted fault"]
        else:
            wrong += reports
    return wrong


def plant(kind: str) -> None:
    """Run a fault that the sanitizer `kind` must see."""
    with tempfile.TemporaryDirectory() as directory:
        source = Path(directory, "planted.c")
        source.write_text(PLANTED, encoding="utf-8")
        library = str(source.with_suffix(".so"))
        command = [os.environ["CC"], "-shared", "-fPIC", str(source), "-o", library]
        subprocess.run(command, check=True)
        getattr(ctypes.CDLL(library), kind)(8)


def run_engines(kind: str) -> None:
    """Generate twice with each of ENGINES that `kind` can judge: the tokens must be equal."""
    from nanovllm import LLM, SamplingParams
    from nanovllm.kernels.cpu.library import library
    from tests.checkpoints import make_checkpoint

    families = import_module("tests.test_native_invariance")
    assert library() is not None, "torch would serve, and nothing would be tested"
    judged = [each for each in ENGINES if kind != "thread" or each[1] is None]
    for number, (family, quantization) in enumerate(judged):
        sizes = {**families.MODEL, **families.OTHER_FAMILIES.get(family, {})}
        drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}
        with tempfile.TemporaryDirectory() as directory:
            llm = LLM(
                make_checkpoint(Path(directory), family, **sizes),
                dtype="bfloat16",
                device="cpu",
                quantization=quantization,
                max_model_len=128,
                max_num_batched_tokens=48,
                num_threads=2,
                speculative_config=drafts if number % 2 else None,
            )
            prompts = [[5, 6, 7, 5, 6, 7, 5], list(range(1, 60)), [9]]
            params = [SamplingParams(temperature=t, seed=1, max_tokens=6) for t in (0, 0.8, 1)]
            first, second = (llm.generate(prompts, params, use_tqdm=False) for _ in range(2))
            assert [o.token_ids for o in first] == [o.token_ids for o in second], family
            llm.shutdown()


def main(arguments: list[str]) -> None:
    os.environ.pop("LD_PRELOAD", None)  # this process has it; a compiler crashes with it
    if arguments[:1] == ["--planted"]:
        plant(arguments[1])
    elif arguments[:1] == ["--engines"]:
        run_engines(arguments[1])
    elif arguments[:1] == ["--tests"]:
        sys.exit(pytest.main(["-q", "-x", "-p", "no:cacheprovider", *arguments[1:]]))
    else:
        wrong = []
        for kind in arguments or FLAGS:
            with tempfile.TemporaryDirectory() as place:
                wrong += sanitize(kind, Path(place))
        if wrong:
            sys.exit("\n".join(wrong))
        sys.stdout.write("no fault, and each planted one was seen\n")


if __name__ == "__main__":
    main(sys.argv[1:])
