"""What gpu.py's figures mean: bytes that a workload must move, idle time and shares in a trace of
kernels, and the page of tables. Pure: it imports no torch and needs no GPU.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

import bench

BYTES = 2
"""Of a number in bfloat16: weights and KV."""
PAUSE = 5e-6
"""A gap longer than this is time in which the GPU waited for the host, not for its next kernel."""

KINDS = {
    "attention": r"^_decode|^_prefill|^_plan_decode|flash|fmha|attention",
    "sampler": r"^_reduce_blocks|^_choose",
    "norm, activation, store": r"^_add_rms_norm|^_silu_and_mul|^_store|^_quantize_fp8",
    "step state": r"^_gather|^_advance",
    "GEMM": r"^_multiply_fp8|gemm|gemv|nvjet|cutlass|cublas|splitk|xmma",
    "copies": r"^memcpy|^memset",
}
"""Kinds of GPU work by what their names match, the first that does; anything else is "other"."""


class Kernel(NamedTuple):
    """Work of the GPU: its name, and when it began and ended, in seconds."""

    name: str
    start: float
    end: float


class Idle(NamedTuple):
    """Shares of a span in which the GPU ran nothing."""

    all: float
    paused: float
    """In gaps longer than PAUSE."""


def workload(num_seqs: int = 256) -> tuple[list[list[int]], list[int]]:
    """Return the prompts and output lengths of nano-vllm's benchmark, from seed 0."""
    return bench.workload(num_seqs, (100, 1024), (100, 1024), seed=0)


def weight_bytes(config: Mapping[str, Any]) -> int:
    """Return what a decode step reads of the weights: every linear layer once, and the head."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    queries, keys = (n * config["head_dim"] for n in (heads, config["num_key_value_heads"]))
    layer = hidden * (2 * queries + 2 * keys + 3 * config["intermediate_size"])
    numbers: int = config["num_hidden_layers"] * layer + config["vocab_size"] * hidden
    return BYTES * numbers


def kv_bytes(config: Mapping[str, Any]) -> int:
    """Return the bytes of keys and values of a token, over all layers."""
    numbers: int = 2 * config["num_key_value_heads"] * config["head_dim"]
    return BYTES * numbers * int(config["num_hidden_layers"])


def step_bytes(config: Mapping[str, Any], batch: int, length: float) -> float:
    """Return what a decode step reads for `batch` rows of `length` tokens each."""
    return weight_bytes(config) + batch * length * kv_bytes(config)


def tokens_read(prompt_lens: Iterable[int], output_lens: Iterable[int]) -> int:
    """Return how many tokens' keys and values decoding reads.

    The prompt's step gives the first token. Each of the others reads the prompt and the output so
    far, the token it comes from included.
    """
    lens = zip(prompt_lens, output_lens, strict=True)
    return sum((out - 1) * prompt + (out - 1) * out // 2 for prompt, out in lens)


def workload_floor(
    config: Mapping[str, Any],
    prompt_lens: Sequence[int],
    output_lens: Sequence[int],
    bandwidth: float,
    flops: float,
) -> dict[str, float]:
    """Return the seconds below which no engine can serve all at once, by what takes them.

    Decoding reads the weights in each step of the longest output, and the keys and values; the
    prompts are multiplied with the weights, without the head. Activations and attention among
    prompts are not counted.
    """
    head = BYTES * config["vocab_size"] * config["hidden_size"]
    multiplied = (weight_bytes(config) - head) / BYTES
    parts = {
        "weights": (max(output_lens) - 1) * weight_bytes(config) / bandwidth,
        "KV": tokens_read(prompt_lens, output_lens) * kv_bytes(config) / bandwidth,
        "prompts": 2 * multiplied * sum(prompt_lens) / flops,
    }
    return {**parts, "all": sum(parts.values())}


def kernels_of_trace(trace: Mapping[str, Any]) -> list[Kernel]:
    """Return the GPU's work in a Chrome trace of torch.profiler, by start."""
    kernels = [
        Kernel(event["name"], event["ts"] * 1e-6, (event["ts"] + event["dur"]) * 1e-6)
        for event in trace["traceEvents"]
        if event.get("ph") == "X" and event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")
    ]
    return sorted(kernels, key=lambda kernel: kernel.start)


def settled(kernels: Sequence[Kernel], skip: float = 0.2) -> list[Kernel]:
    """Leave out what begins in the first `skip` of the span, while the profiler starts."""
    if not kernels:
        return []
    first, last = kernels[0].start, max(kernel.end for kernel in kernels)
    return [kernel for kernel in kernels if kernel.start >= first + skip * (last - first)]


def idle(kernels: Sequence[Kernel]) -> Idle:
    """Return the share of the span from the first start to the last end in which nothing ran.

    `kernels` are in the order of their starts and may overlap.
    """
    assert kernels, "no GPU work in the trace"
    first = until = kernels[0].start
    gaps = []
    for kernel in kernels:
        gaps.append(max(kernel.start - until, 0.0))
        until = max(until, kernel.end)
    span = until - first
    return Idle(sum(gaps) / span, sum(gap for gap in gaps if gap > PAUSE) / span)


def kind_of(name: str) -> str:
    """Return the kind of a kernel's name."""
    found = (kind for kind, pattern in KINDS.items() if re.search(pattern, name, re.IGNORECASE))
    return next(found, "other")


def shares(kernels: Sequence[Kernel]) -> dict[str, float]:
    """Return the share of the span that each kind of work takes, and the idle one."""
    idle_share = idle(kernels).all
    span = max(kernel.end for kernel in kernels) - kernels[0].start
    seconds = dict.fromkeys([*KINDS, "other"], 0.0)
    for kernel in kernels:
        seconds[kind_of(kernel.name)] += kernel.end - kernel.start
    return {**{kind: value / span for kind, value in seconds.items()}, "idle": idle_share}


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """Return the lines of a Markdown table."""
    lines = []
    for row in (head, ["---"] * len(head), *rows):
        cells = [str(cell).replace("|", "\\|") for cell in row]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def percent(value: float | None, digits: int = 0) -> str:
    """Write a share; a dash where there is none."""
    return "–" if value is None else f"{100 * value:.{digits}f}%"


def page(
    machine: Mapping[str, str], command: str, results: Mapping[str, Any], configs: Mapping[str, Any]
) -> str:
    """Return the page: machine, versions, command, and the tables of the parts that ran.

    Args:
        results: by part, what it recorded; `ended` says how it ended.
        configs: by name, the models' config.json.
    """
    measured = results.get("bandwidth", {})
    lines = [f"# {machine['GPU']}, {machine['date']}", ""]
    lines += table(["", ""], machine.items())
    lines += ["", "```sh", command, "```", ""]
    lines += table(
        ["part", "ended", "seconds"],
        ([name, part["ended"], f"{part['seconds']:.0f}"] for name, part in results.items()),
    )
    for name, (title, make) in SECTIONS.items():
        part = results.get(name)
        if part is not None and any(key not in ("ended", "seconds") for key in part):
            lines += ["", f"## {title}", "", *make(part, measured, configs)]
    return "\n".join(lines) + "\n"


def _tests(part: Any, measured: Any, configs: Any) -> list[str]:
    files: dict[str, Any] = part.get("files", {})
    counts = ["passed", "failed", "errors", "skipped"]
    totals = [sum(file[count] for file in files.values()) for count in counts]
    lines = [f"{len(files)} files: " + ", ".join(map("{} {}".format, totals, counts)) + ".", ""]
    bad = {name: file for name, file in files.items() if file["ended"] != "passed"}
    if bad:
        lines += table(
            ["file", "ended", *counts],
            ([name, file["ended"], *(file[c] for c in counts)] for name, file in bad.items()),
        )
    for name, found in part.get("sanitizer", {}).items():
        lines.append(f"- compute-sanitizer, {name}: {found}")
    return lines


def _bandwidth(part: Any, measured: Any, configs: Any) -> list[str]:
    rows = [[name, f"{part[name] / 1e12:.2f} T{unit}/s"] for name, unit in UNITS.items()]
    return table(["measured", ""], rows)


def _attention(part: Any, measured: Any, configs: Any) -> list[str]:
    copy = measured.get("copy")
    rows = []
    for row in part["rows"]:
        cells = [row["backend"], row["options"]]
        if "error" in row:
            rows.append([*cells, row["error"], "", "", ""])
            continue
        rate = row["bytes"] / row["seconds"]
        shape = f"{row['batch']} x {row['length']}"
        us = f"{1e6 * row['seconds']:.1f}"
        rows.append([*cells, shape, us, f"{rate / 1e12:.2f}", percent(copy and rate / copy)])
    head = ["backend", "options", "rows x tokens", "us a layer", "TB/s", "of the copy's"]
    return table(head, rows)


def _nano(part: Any, measured: Any, configs: Any) -> list[str]:
    prompt_lens, output_lens = part["prompt_lens"], part["output_lens"]
    config, tokens = configs[part["model"]], sum(output_lens)
    moved = tokens_read(prompt_lens, output_lens) * kv_bytes(config)
    if "runs" not in part:
        return ["No run ended."]
    seconds = median(part["runs"])
    runs = ", ".join(f"{run:.2f}" for run in part["runs"])
    lines = [
        f"{len(prompt_lens)} requests, {sum(prompt_lens):,} tokens in, {tokens:,} out; "
        f"{moved / 1e12:.2f} TB of KV to read. Runs of {runs} s; the median is "
        f"**{tokens / seconds:,.0f} output tokens/s**.",
        "",
    ]
    if "copy" in measured:
        floor = workload_floor(
            config, prompt_lens, output_lens, measured["copy"], measured["matmul"]
        )
        rows = [[name, f"{s:.2f}", f"{tokens / s:,.0f}"] for name, s in floor.items()]
        rows.append(["measured", f"{seconds:.2f}", f"{tokens / seconds:,.0f}"])
        lines += table(["floor", "seconds", "tokens/s"], rows)
        lines += ["", f"{percent(floor['all'] / seconds)} of the floor.", ""]
    if "shares" in part:
        lines += table(
            ["GPU time of a profiled run", "share"],
            ([kind, percent(share, 1)] for kind, share in part["shares"].items()),
        )
        lines += ["", f"Profiled, the run took {part['profiled']:.2f} s."]
    return lines


def _single(part: Any, measured: Any, configs: Any) -> list[str]:
    copy, config = measured.get("copy"), configs[part["model"]]
    rows = []
    for row in part.get("latency", []):
        floor = copy and step_bytes(config, 1, row["length"]) / copy
        ms = "–" if floor is None else f"{1e3 * floor:.3f}"
        of = percent(floor and floor / row["seconds"])
        rows.append([row["length"], row["queue_depth"], f"{1e3 * row['seconds']:.3f}", ms, of])
    lines = table(["context", "queue depth", "ms a token", "floor", "of the floor"], rows)
    profiles = part.get("idle", [])
    if profiles:
        lines += ["", "Idle while decoding, from a trace of the steady window:", ""]
        lines += table(
            ["batch", "ms a step", "profiled", "kernels", "idle", "in gaps over 5 us", "largest"],
            (
                [
                    row["batch"],
                    f"{1e3 * row['seconds']:.3f}",
                    f"{1e3 * row['profiled']:.3f}",
                    f"{row['kernels']:.0f}",
                    percent(row["idle"], 1),
                    percent(row["paused"], 1),
                    ", ".join(
                        f"{kind} {percent(share)}"
                        for kind, share in sorted(row["shares"].items(), key=lambda x: -x[1])[:4]
                    ),
                ]
                for row in profiles
            ),
        )
    return lines


def _models(part: Any, measured: Any, configs: Any) -> list[str]:
    copy = measured.get("copy")
    rows = []
    for row in part["rows"]:
        cells = [row["model"], "no" if row["eager"] else "yes"]
        if "error" in row:
            rows.append([*cells, row["error"], "", "", "", ""])
            continue
        batch, seconds = row["batch"], row["seconds"]
        floor = copy and step_bytes(configs[row["model"]], batch, row["length"]) / copy
        rows.append(
            [
                *cells,
                f"{batch} x {row['length']:.0f}",
                f"{1e3 * seconds:.2f}",
                "–" if floor is None else f"{1e3 * floor:.2f}",
                f"{batch / seconds:,.0f}",
                percent(floor and floor / seconds),
            ]
        )
    head = ["model", "graphs", "rows x tokens", "ms a step", "floor", "tokens/s", "of the floor"]
    return table(head, rows)


def _peers(part: Any, measured: Any, configs: Any) -> list[str]:
    lines = [
        f"{part['requests']} requests of the workload, {part['tokens']:,} tokens out, the engines "
        "in turn; seconds of each round.",
        "",
    ]
    ours = part["rounds"].get("nanovllm", [])
    rows = []
    for name, times in part["rounds"].items():
        if not times or not ours:
            rows.append([name, "no round ended", "–", "–"])
            continue
        ratio = median(peer / own for peer, own in zip(times, ours, strict=False))
        rate = part["tokens"] / median(times)
        rows.append([name, ", ".join(f"{t:.2f}" for t in times), f"{rate:,.0f}", f"{ratio:.2f}"])
    lines += table(["engine", "seconds", "tokens/s", "its time over ours"], rows)
    lines += [f"- {name}: {reason}" for name, reason in part["absent"].items()]
    return lines


UNITS = {"copy": "B", "read": "B", "matmul": "FLOP"}
SECTIONS = {
    "tests": ("Tests", _tests),
    "bandwidth": ("What the GPU can do", _bandwidth),
    "attention": ("Decode attention, a layer of Qwen3-0.6B", _attention),
    "nano": ("nano-vllm's workload, Qwen3-0.6B's shape", _nano),
    "single": ("One sequence, and idle time", _single),
    "models": ("Decode steps by model", _models),
    "peers": ("Beside other engines", _peers),
}
"""By part, in the page's order: the title, and what turns figures into lines."""
