"""Test and measure on a CUDA machine in under ten minutes: a JSON file for each part and one page
of tables, in --out. Weights are random, in the shapes of Qwen3; nothing is downloaded.

Each part is a process with a limit, and writes what it has as it goes: a failure costs that part
alone. Exits with 1 where a part did not end well, and with 2 where there is no CUDA device.
"""

import argparse
import contextlib
import dataclasses
import datetime
import gc
import importlib
import importlib.metadata
import inspect
import json
import os
import platform
import random
import shutil
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).parent.parent))
import gpu_report

from bench import QWEN3_06B, Prompts, vllm as start_vllm

if TYPE_CHECKING:
    from nanovllm.attention.paged import PagedBackend
    from nanovllm.engine.llm_engine import LLMEngine

Run = Callable[[Prompts, list[int]], None]
"""Takes prompts and output lengths."""

ROOT = Path(__file__).parent.parent
SMALL = "Qwen3-0.6B"
CONFIGS: dict[str, dict[str, Any]] = {
    SMALL: QWEN3_06B,
    "Qwen3-8B": {
        **QWEN3_06B,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "tie_word_embeddings": False,
    },
    "Qwen3-32B": {
        **QWEN3_06B,
        "hidden_size": 5120,
        "intermediate_size": 25600,
        "num_hidden_layers": 64,
        "num_attention_heads": 64,
        "tie_word_embeddings": False,
    },
}
BATCHES = (1, 64, 256)
ATTENTION_SHAPES = ((256, 600), (128, 1060), (37, 1490), (1, 4096))
"""Rows, and tokens of each."""
SWEEP: tuple[dict[str, int], ...] = (
    {"SPLIT_TOKENS": 128},
    {"SPLIT_TOKENS": 512},
    {"_PROGRAMS": 1024},
    {"_PROGRAMS": 4096},
    {"N": 32},
    {"N": 128},
    {"num_warps": 2},
    {"num_warps": 8},
    {"num_stages": 2},
    {"num_stages": 4},
)
"""Options of the Triton decode kernel, each in place of one that it has now: constants of
kernels/triton/decode_attention.py, or what it launches the kernel with."""
TESTS_ALONE = ("tests/worker/test_cuda_graph.py", "tests/worker/test_kv_cache.py")
"""They look at the memory of the whole GPU, which others would change meanwhile."""
SANITIZED = {
    "tests/kernels/triton/test_ops.py": "bfloat16 or slots or length or negative",
    "tests/kernels/triton/test_fp8.py": "multiply or bfloat16",
    "tests/kernels/triton/test_attention.py": "test_groups or edges or length_0 or float8",
    "tests/kernels/triton/test_decode_step.py": "gather or advance",
}
"""Test files, and which of their tests, that compute-sanitizer watches: it is slow."""
WARM_STEPS = 16


class Record:
    """A part's figures, written to disk at each `save`, and how long it may go on."""

    def __init__(self, path: Path, seconds: float) -> None:
        self.figures: dict[str, Any] = {}
        self.directory = path.parent
        self._path = path
        self._until = time.monotonic() + seconds

    def left(self) -> float:
        """Return the seconds that are left."""
        return self._until - time.monotonic()

    def save(self) -> None:
        """Replace the file."""
        temporary = self._path.with_suffix(".tmp")
        temporary.write_text(json.dumps(self.figures, indent=1))
        temporary.replace(self._path)

    def add(self, name: str, row: Any) -> None:
        """Append to a list of the figures, and save."""
        self.figures.setdefault(name, []).append(row)
        print(name, row, flush=True)
        self.save()

    def model(self, name: str) -> str:
        """Return the directory of a model's config and tokenizer."""
        return str(self.directory / "models" / name)


# Tests


def tests(record: Record) -> None:
    """Run each test file in a process of its own, then compute-sanitizer on some.

    What looks at the memory of the whole GPU comes first, alone; then the kernels of a GPU.
    """
    files = sorted(
        ROOT.glob("tests/**/test_*.py"),
        key=lambda file: ("test_gpu" not in file.name, -file.stat().st_size),
    )
    names = [file.relative_to(ROOT).as_posix() for file in files]
    logs = record.directory / "tests"
    logs.mkdir(exist_ok=True)
    record.figures["files"] = {}

    def run(name: str) -> tuple[str, dict[str, Any]]:
        return name, run_test_file(name, logs, record.left())

    for group, workers in (
        ([name for name in names if name in TESTS_ALONE], 1),
        ([name for name in names if name not in TESTS_ALONE], max(1, (os.cpu_count() or 1) - 2)),
    ):
        with ThreadPoolExecutor(workers) as pool:
            for job in as_completed([pool.submit(run, name) for name in group]):
                name, result = job.result()
                record.figures["files"][name] = result
                record.save()
    record.figures["sanitizer"] = {}
    with ThreadPoolExecutor(len(SANITIZED)) as pool:
        jobs = {name: pool.submit(sanitize, name, logs, record.left()) for name in SANITIZED}
        for name, found in jobs.items():
            record.figures["sanitizer"][name] = found.result()
            record.save()


def run_test_file(name: str, logs: Path, seconds: float) -> dict[str, Any]:
    """Return a test file's counts, its failures, and how it ended."""
    log = logs / name.removeprefix("tests/").replace("/", "-")
    report = log.with_suffix(".xml")
    command = [sys.executable, "-m", "pytest", name, "-p", "no:cacheprovider"]
    code = run_logged([*command, f"--junitxml={report}"], log.with_suffix(".log"), seconds)
    counts: dict[str, Any] = dict.fromkeys(("passed", "failed", "errors", "skipped"), 0)
    failures = []
    if report.exists():
        for case in xml.etree.ElementTree.parse(report).iter("testcase"):
            kinds = [child.tag for child in case if child.tag in ("failure", "error", "skipped")]
            kind = kinds[0] if kinds else "passed"
            counts[{"failure": "failed", "error": "errors"}.get(kind, kind)] += 1
            if kind in ("failure", "error"):
                found = case.find(kind)
                message = "" if found is None else found.get("message", "")
                failures.append(f"{case.get('name')}: {message:.300}")
    ended = {None: "out of time", 0: "passed", 5: "passed"}.get(code, f"exit status {code}")
    return {**counts, "ended": ended, "failures": failures}


def sanitize(name: str, logs: Path, seconds: float) -> str:
    """Run memcheck over some tests of a file and return what it found."""
    places = os.pathsep.join([os.environ.get("PATH", ""), "/usr/local/cuda/bin"])
    tool = shutil.which("compute-sanitizer", path=places)
    if tool is None:
        return "compute-sanitizer is not installed"
    log = logs / f"memcheck-{Path(name).stem}.log"
    command = [tool, "--tool", "memcheck", "--error-exitcode", "9", sys.executable, "-m", "pytest"]
    command += [name, "-p", "no:cacheprovider", "-k", SANITIZED[name]]
    # One allocation for each tensor, so that reading past a tensor's end is seen.
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    code = run_logged(command, log, seconds, environment)
    lines = log.read_text(errors="replace").splitlines()
    summary = [line for line in lines if "ERROR SUMMARY" in line or line.endswith(" s")]
    last = "; ".join(line.strip("= ") for line in summary or lines[-1:])
    return f"{'out of time' if code is None else f'exit status {code}'}; {last}"


def run_logged(
    command: Sequence[str], log: Path, seconds: float, environment: dict[str, str] | None = None
) -> int | None:
    """Run a command in the root, its output in `log`; None where it took too long."""
    if seconds <= 0:
        log.write_text("no time was left\n")
        return None
    with log.open("w") as output:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT
        )
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            return None


# What the GPU can do


def bandwidth(record: Record) -> None:
    """Copy 4 GB, read 4 GB into one number, multiply matrices."""
    import torch

    source = torch.ones(2**31, dtype=torch.bfloat16, device="cuda")
    target = torch.empty_like(source)
    record.figures["copy"] = 2 * source.nbytes / gpu_seconds(lambda: target.copy_(source))
    record.figures["read"] = source.nbytes / gpu_seconds(source.view(torch.float32).sum)
    size = 8192
    a = torch.randn(size, size, dtype=torch.bfloat16, device="cuda")
    record.figures["matmul"] = 2 * size**3 / gpu_seconds(lambda: a @ a.T)
    record.save()


def gpu_seconds(work: Callable[[], object], repeat: int = 5, samples: int = 5) -> float:
    """Return the median seconds of `work`, many launches between two events."""
    import torch

    for _ in range(3):
        work()
    times: list[float] = []
    for _ in range(samples):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        for _ in range(repeat):
            work()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e-3 / repeat)
    return median(times)


# Attention


def attention(record: Record) -> None:
    """Decode attention by each backend, then the Triton kernel with other options."""
    import torch

    from nanovllm.attention.backend import AttentionSpec
    from nanovllm.attention.flash_attn import FlashAttnBackend
    from nanovllm.attention.triton import TritonBackend
    from nanovllm.attention.varlen import VarlenBackend

    spec = AttentionSpec(16, 8, 128, torch.bfloat16, torch.device("cuda"), None)
    kinds: list[Any] = [TritonBackend, FlashAttnBackend, VarlenBackend]
    for kind in kinds:
        label = {"backend": kind.name, "options": ""}
        refusal = kind.unsupported(spec)
        if refusal is None:
            measure_attention(record, kind(spec), label)
        else:
            record.add("rows", {**label, "error": refusal})
    for options in SWEEP:
        text = ", ".join(f"{name}={value}" for name, value in options.items())
        label = {"backend": TritonBackend.name, "options": text}
        set_decode_options(options)
        measure_attention(record, kinds[0](spec), label)


def set_decode_options(options: dict[str, int]) -> None:
    """Compile the Triton kernels anew, with other constants or launch options."""
    import triton.language as tl

    from nanovllm.kernels.triton import decode_attention

    # Reloaded, because a kernel that was compiled refuses other values of its constants.
    names = vars(importlib.reload(decode_attention))
    launched: Callable[..., dict[str, int]] = names["_decode_options"]
    chosen: dict[str, int] = {}
    for name, value in options.items():
        if name in names:
            names[name] = value
            twin = f"_{name}"
            if isinstance(names.get(twin), tl.constexpr):
                names[twin] = tl.constexpr(value)
        else:
            chosen[name] = value
    names["_decode_options"] = lambda *args: {**launched(*args), **chosen}


def measure_attention(record: Record, backend: "PagedBackend", label: dict[str, str]) -> None:
    """Add a row for each of ATTENTION_SHAPES, or the error."""
    import torch

    for batch, length in ATTENTION_SHAPES:
        try:
            seconds, num_bytes = time_attention(backend, batch, length)
        except Exception as error:
            record.add("rows", {**label, "error": f"{batch} x {length}: {describe(error)}"})
            if isinstance(error, torch.AcceleratorError):
                raise  # nothing runs on this device in this process any more
            continue
        row = {"batch": batch, "length": length, "seconds": seconds, "bytes": num_bytes}
        record.add("rows", {**label, **row})


def time_attention(backend: "PagedBackend", batch: int, length: int) -> tuple[float, int]:
    """Return a layer's seconds and its bytes of keys and values, in a graph of a model's layers.

    Each layer has a cache of its own, as in a model, so that none is found in the L2.
    """
    import torch

    from nanovllm.attention.batch import Batch

    spec, device = backend.spec, torch.device("cuda")
    per_row = -(-length // backend.block_size)
    layers = QWEN3_06B["num_hidden_layers"]
    assert isinstance(layers, int)
    with torch.inference_mode():
        shape = backend.kv_cache_shape(batch * per_row)
        caches = torch.empty(layers, *shape, dtype=spec.dtype, device=device).normal_()
        tables = torch.zeros(batch, 4096 // backend.block_size, dtype=torch.int32, device=device)
        tables[:, :per_row] = torch.randperm(batch * per_row, device=device).view(batch, per_row)
        positions = torch.full((batch,), length - 1, device=device)
        rows = Batch(
            input_ids=positions,
            positions=positions,
            slot_mapping=positions,
            cu_seqlens_q=torch.arange(batch + 1, dtype=torch.int32, device=device),
            seq_lens=torch.full((batch,), length, dtype=torch.int32, device=device),
            block_tables=tables,
            query_lens_host=(),
            seq_lens_host=(),
        )
        q = torch.randn(batch, spec.num_heads, spec.head_dim, dtype=spec.dtype, device=device)

        def step() -> None:
            planned = dataclasses.replace(rows, metadata=backend.plan(rows))
            for cache in caches:
                backend.attend(q, cache, planned)

        step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        seconds = gpu_seconds(graph.replay) / layers
    row_bytes = 2 * spec.num_kv_heads * spec.head_dim * spec.dtype.itemsize
    return seconds, batch * length * row_bytes


# Engines


def make_engine(
    record: Record, name: str, queue_depth: int | None = None, **options: Any
) -> "LLMEngine":
    """Return an engine with random weights that caches no prefix."""
    from nanovllm.config import Config
    from nanovllm.engine.llm_engine import LLMEngine

    config = Config(
        model=record.model(name), load_format="dummy", enable_prefix_caching=False, **options
    )
    return LLMEngine(config, queue_depth=queue_depth)


def pool_bytes(name: str, batch: int, length: int) -> int:
    """Return a pool for `batch` rows that grow by a few hundred tokens."""
    return batch * (length + 512) * gpu_report.kv_bytes(CONFIGS[name])


@contextlib.contextmanager
def decoding(engine: "LLMEngine", batch: int, length: int) -> Iterator[None]:
    """Bring `batch` sequences past prompts of `length`, and some steps on; abort them at the end.

    They go on for 300 steps at least.
    """
    from nanovllm import SamplingParams

    rng = random.Random(0)
    params = SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=300 + WARM_STEPS + 64)
    before = engine.stats.num_prefill_tokens
    requests = [
        engine.add_request([rng.randint(0, 10000) for _ in range(length)], params)
        for _ in range(batch)
    ]
    while engine.stats.num_prefill_tokens - before < batch * (length - 1):
        engine.step()
    for _ in range(WARM_STEPS):
        engine.step()
    try:
        yield
    finally:
        for request in requests:
            engine.abort(request)
        while not engine.is_finished():
            engine.step()


def step_seconds(engine: "LLMEngine", batch: int, steps: int) -> float:
    """Return the seconds of a step while decoding, as the host sees them."""
    before, start = engine.stats.num_decode_tokens, time.perf_counter()
    for _ in range(steps):
        engine.step()
    seconds = time.perf_counter() - start
    return seconds * batch / (engine.stats.num_decode_tokens - before)


def profile(work: Callable[[], object], trace: Path) -> list[gpu_report.Kernel]:
    """Return the GPU's work while `work` runs. Watching every kernel of a graph slows it."""
    import torch

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        work()
        torch.cuda.synchronize()
    profiler.export_chrome_trace(str(trace))
    kernels = gpu_report.kernels_of_trace(json.loads(trace.read_text()))
    trace.unlink()
    return kernels


def release() -> None:
    """Give back what dropped engines held."""
    import torch

    gc.collect()
    torch.cuda.empty_cache()


def nano(record: Record) -> None:
    """nano-vllm's workload three times, then once with the profiler."""
    from nanovllm import LLM, SamplingParams

    prompts, output_lens = gpu_report.workload()
    llm = LLM(
        record.model(SMALL), load_format="dummy", enable_prefix_caching=False, max_model_len=4096
    )
    record.figures |= {
        "model": SMALL,
        "prompt_lens": [len(prompt) for prompt in prompts],
        "output_lens": output_lens,
    }
    params = [
        SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=length)
        for length in output_lens
    ]

    def run() -> float:
        start = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        return time.perf_counter() - start

    llm.generate(prompts[:32], params[0], use_tqdm=False)
    for _ in range(3):
        record.add("runs", run())
    seconds: list[float] = []
    kernels = profile(lambda: seconds.append(run()), record.directory / "nano-trace.json")
    record.figures |= {"shares": gpu_report.shares(kernels), "profiled": seconds[0]}
    record.save()


def single(record: Record) -> None:
    """One sequence's latency by queue depth; the GPU's idle time by batch."""
    record.figures["model"] = SMALL
    for queue_depth in (1, 2, 4):
        engine = make_engine(
            record, SMALL, queue_depth, max_num_seqs=1, kv_cache_memory_bytes=2**30
        )
        for length in (100, 3700):
            with decoding(engine, 1, length):
                seconds = step_seconds(engine, 1, 256)
            figures = {"length": length, "queue_depth": queue_depth, "seconds": seconds}
            record.add("latency", figures)
        engine.shutdown()
        del engine
        release()
    length, steps = 512, 40
    pool = pool_bytes(SMALL, max(BATCHES), length)
    engine = make_engine(record, SMALL, max_num_seqs=max(BATCHES), kv_cache_memory_bytes=pool)
    seconds_of = {}  # all before the first profile: what watches the GPU stays, and slows it
    for batch in BATCHES:
        with decoding(engine, batch, length):
            seconds_of[batch] = step_seconds(engine, batch, 64)
        record.add("unprofiled", {"batch": batch, "seconds": seconds_of[batch]})
    for batch in BATCHES:
        with decoding(engine, batch, length):
            profiled: list[float] = []
            kernels = profile(
                lambda: profiled.append(step_seconds(engine, batch, steps)),  # noqa: B023, runs now
                record.directory / "idle-trace.json",
            )
        window = gpu_report.settled(kernels)
        idle = gpu_report.idle(window)
        row: dict[str, Any] = {
            "batch": batch,
            "seconds": seconds_of[batch],
            "profiled": profiled[0],
            "kernels": len(kernels) / steps,
            "idle": idle.all,
            "paused": idle.paused,
            "shares": gpu_report.shares(window),
        }
        record.add("idle", row)


def models(record: Record) -> None:
    """Decode steps of each model at each batch size, the small one without graphs too."""
    for name, eager in ((SMALL, False), (SMALL, True), ("Qwen3-8B", False), ("Qwen3-32B", False)):
        try:
            measure_model(record, name, eager)
        except Exception as error:
            record.add("rows", {"model": name, "eager": eager, "error": describe(error)})
        release()


def measure_model(record: Record, name: str, eager: bool) -> None:
    """Add a row for each batch size."""
    length, steps = 256, 64
    engine = make_engine(
        record,
        name,
        max_num_seqs=max(BATCHES),
        max_model_len=1024,
        kv_cache_memory_bytes=pool_bytes(name, max(BATCHES), length),
        enforce_eager=eager,
    )
    for batch in BATCHES:
        with decoding(engine, batch, length):
            seconds = step_seconds(engine, batch, steps)
        row = {"batch": batch, "length": length + WARM_STEPS + steps / 2, "seconds": seconds}
        record.add("rows", {"model": name, "eager": eager, **row})
    engine.shutdown()


# Other engines


def peers(record: Record) -> None:
    """Our engine and others in turn, three rounds of as many requests as there is time for."""
    record.figures |= {"requests": 0, "tokens": 0, "rounds": {}, "absent": {}}
    with contextlib.ExitStack() as stack:
        engines: dict[str, Run] = {}
        trial, lens = gpu_report.workload(32)
        round_seconds = 0.0
        for name, make in PEERS.items():
            try:
                run = make(record.model(SMALL), stack)
                run(trial[:2], [8, 8])
                start = time.perf_counter()
                run(trial, lens)
                round_seconds += time.perf_counter() - start
                engines[name] = run
            except Exception as error:
                record.figures["absent"][name] = describe(error)
            record.save()
        record.figures["absent"]["nano-vllm"] = "its package has the name of ours"
        # A batch of 8 times the requests takes at most 8 times as long.
        sizes = (256, 128, 64, 32)
        fitting = (n for n in sizes if 3 * round_seconds * n / 32 < record.left() - 5)
        prompts, output_lens = gpu_report.workload(next(fitting, sizes[-1]))
        record.figures |= {"requests": len(prompts), "tokens": sum(output_lens)}
        record.figures["rounds"] = {name: [] for name in engines}
        for _ in range(3):
            for name, run in engines.items():
                start = time.perf_counter()
                run(prompts, output_lens)
                record.figures["rounds"][name].append(time.perf_counter() - start)
                record.save()


def ours(model: str, stack: contextlib.ExitStack) -> Run:
    """Our engine, with a pool for the whole workload beside other engines' memory."""
    from nanovllm import LLM, SamplingParams

    llm = LLM(
        model, load_format="dummy", enable_prefix_caching=False, kv_cache_memory_bytes=36 * 10**9
    )

    def run(prompts: Prompts, output_lens: list[int]) -> None:
        params = [
            SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=length)
            for length in output_lens
        ]
        llm.generate(prompts, params, use_tqdm=False)

    return run


def transformers(model: str, stack: contextlib.ExitStack) -> Run:
    """transformers' continuous batching; its arguments have changed from release to release."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    with torch.device("cuda"):
        config = AutoConfig.from_pretrained(model)
        hf = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    generation_config = GenerationConfig(
        max_new_tokens=1024,
        do_sample=True,
        temperature=0.6,
        top_k=0,
        top_p=1.0,
        eos_token_id=-1,
        pad_token_id=0,
    )
    options: dict[str, Any] = {"generation_config": generation_config}
    with contextlib.suppress(ImportError):
        from transformers import ContinuousBatchingConfig

        # As elsewhere, no prefix is cached: every round has the same prompts.
        options["continuous_batching_config"] = ContinuousBatchingConfig(allow_block_sharing=False)
    manager = hf.init_continuous_batching(**options)
    if hasattr(manager, "warmup"):
        manager.warmup()
    manager.start()
    stack.callback(manager.stop, block=True, timeout=5)
    takes_eos = "eos_token_id" in inspect.signature(manager.add_request).parameters
    eos = {"eos_token_id": -1} if takes_eos else {}

    def run(prompts: Prompts, output_lens: list[int]) -> None:
        expected = {
            manager.add_request(prompt, max_new_tokens=length, **eos): length
            for prompt, length in zip(prompts, output_lens, strict=True)
        }
        while expected:
            result = manager.get_result(timeout=1)
            if result is None and not manager.is_running():
                raise RuntimeError("its generation thread has ended")
            if result is None or not result.is_finished():
                continue
            length = expected.pop(result.request_id)
            if result.error is not None or len(result.generated_tokens) != length:
                found = len(result.generated_tokens)
                raise RuntimeError(f"{found} of {length} tokens, error {result.error}")

    return run


def vllm(model: str, stack: contextlib.ExitStack) -> Run:
    """vLLM, in what memory is left of half the GPU."""
    options = {"gpu_memory_utilization": 0.45}
    args = {"load_format": "dummy", "max_model_len": 4096, "json": True}
    run = start_vllm(model, argparse.Namespace(**args, option=options))
    return lambda prompts, output_lens: run(prompts, output_lens, {"temperature": 0.6})


PEERS: dict[str, Callable[[str, contextlib.ExitStack], Run]] = {
    "nanovllm": ours,
    "transformers": transformers,
    "vllm": vllm,
}
PARTS: dict[str, tuple[Callable[[Record], None], float]] = {
    "tests": (tests, 170),
    "bandwidth": (bandwidth, 30),
    "attention": (attention, 80),
    "nano": (nano, 80),
    "single": (single, 70),
    "models": (models, 130),
    "peers": (peers, 110),
}
"""What each part runs, and the seconds that it may take; more, where --minutes allows all more."""


# The script


def describe(error: Exception) -> str:
    """Return one line that says what went wrong."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]:.200}"


def write_models(directory: Path) -> None:
    """Write each model's config, and a byte-level tokenizer in which each token is a word."""
    from tokenizers import Tokenizer, decoders, models as tokenizer_models, pre_tokenizers

    size: Any = QWEN3_06B["vocab_size"]
    vocab = {f"Ġw{token}": token for token in range(size)}
    tokenizer = Tokenizer(tokenizer_models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    tokenizer.decoder = decoders.ByteLevel()
    for name, config in CONFIGS.items():
        path = directory / name
        path.mkdir(parents=True, exist_ok=True)
        (path / "config.json").write_text(json.dumps(config))
        tokenizer.save(str(path / "tokenizer.json"))
        settings = {"tokenizer_class": "PreTrainedTokenizerFast"}
        (path / "tokenizer_config.json").write_text(json.dumps(settings))


def describe_machine() -> dict[str, str]:
    """Return GPU, date and versions."""
    import torch

    query = "name,memory.total,driver_version,power.limit,clocks.max.sm"
    gpu = output_of(["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"])
    name, *details = gpu.splitlines()[0].split(", ") if gpu else [torch.cuda.get_device_name()]
    versions = {}
    for package in ("torch", "triton", "transformers", "flash-attn", "vllm"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "not installed"
    return {
        "GPU": name,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "memory, driver, power limit, clock": ", ".join(details) or "unknown",
        "CPU": f"{os.cpu_count()} cores, {platform.machine()}",
        "Python": platform.python_version(),
        "CUDA": str(torch.version.cuda),
        **versions,
        "commit": output_of(["git", "-C", str(ROOT), "rev-parse", "HEAD"]) or "unknown",
    }


def output_of(command: list[str]) -> str:
    """Return what a command prints, or nothing where it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def run_part(name: str, out: Path, seconds: float) -> dict[str, Any]:
    """Run a part in a process of its own and return its figures and how it ended."""
    path = out / f"{name}.json"
    path.unlink(missing_ok=True)
    start = time.monotonic()
    command = [sys.executable, __file__, "--out", str(out), "--part", name]
    command += ["--seconds", str(seconds - 3)]
    with (out / f"{name}.log").open("w") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code = process.wait(seconds)
            ended = "done" if code == 0 else f"exit status {code}"
        except subprocess.TimeoutExpired:
            ended = f"out of time after {seconds:.0f} s"
        with contextlib.suppress(ProcessLookupError):  # its children too
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    figures = json.loads(path.read_text()) if path.exists() else {}
    return {**figures, "ended": ended, "seconds": time.monotonic() - start}


def main() -> int:
    """Run the parts and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="directory for results")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--minutes", type=float, default=9, help="bounds all parts together")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, help=argparse.SUPPRESS)
    args = parser.parse_args()
    until = time.monotonic() + 60 * args.minutes
    import torch

    if not torch.cuda.is_available():
        print("gpu.py: there is no CUDA device here", file=sys.stderr)
        return 2
    out: Path = args.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    if args.part is not None:
        PARTS[args.part][0](Record(out / f"{args.part}.json", args.seconds))
        return 0
    os.environ["HF_HUB_OFFLINE"] = "1"
    write_models(out / "models")
    machine = describe_machine()
    name = f"{machine['GPU']}-{machine['date']}".lower().replace(" ", "-")
    command = f"python benchmarks/gpu.py --parts {' '.join(args.parts)} --minutes {args.minutes:g}"
    results: dict[str, Any] = {}
    stretch = max(1.0, 60 * args.minutes / sum(PARTS[part][1] for part in args.parts))
    for part in args.parts:
        seconds = min(PARTS[part][1] * stretch, until - time.monotonic())
        if seconds < 10:
            results[part] = {"ended": "not begun: no time was left", "seconds": 0.0}
        else:
            results[part] = run_part(part, out, seconds)
        print(f"{part}: {results[part]['ended']}, {results[part]['seconds']:.0f} s", flush=True)
        whole = {"machine": machine, "command": command, "results": results}
        (out / f"{name}.json").write_text(json.dumps(whole, indent=1))
        page = gpu_report.page(machine, command, results, CONFIGS)
        (out / f"{name}.md").write_text(page, encoding="utf-8")
    shutil.rmtree(out / "models")
    failed_files = any(
        file["ended"] != "passed" for file in results.get("tests", {}).get("files", {}).values()
    )
    return int(failed_files or any(part["ended"] != "done" for part in results.values()))


if __name__ == "__main__":
    sys.exit(main())
