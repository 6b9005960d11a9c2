"""How near nanovllm is to what the machine allows: each case's seconds beside its limit.

The limit of a step is the time to read all bytes that it must, or to compute all operations that it
must, whichever is longer: even an engine that overlaps everything cannot be faster. What must be
read: each weight once, of experts those that are chosen, the keys and values of each row, and
states, which are also written. What must be computed: the products of each token with the weights,
of those that sample with the head, and attention. Norms, activations, sampling and what stays in
caches count nothing. The steps are those that the engine makes.

Of a long case of one turn with both, the prompts and the steps after the last one have a row each.

The speeds are measured before and after each round, and the better of both counts: how fast all
threads read memory, and multiply in registers. The peak of resident memory is that of the case,
without the buffer that is read. Without --model: random weights in the shape of Qwen3-0.6B. Linux
only.
"""

import re
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch

from benchmarks.comparison import processor_name
from benchmarks.harness import Table, make_parser
from benchmarks.rates import BUFFER_BYTES, RateMeter, Rates
from benchmarks.shapes import described
from benchmarks.versus import (
    CASES,
    GGUF_TYPES,
    LONG_CASES,
    USUAL,
    WARM_UP,
    Case,
    longest,
    prepared,
)
from benchmarks.work import attention_bits, attention_work, weight_bits, weight_tensors
from nanovllm import LLM, SamplingParams
from nanovllm.core.messages import Row
from nanovllm.layers.attention import Attention
from nanovllm.layers.embed_head import ParallelLMHead, VocabParallelEmbedding
from nanovllm.layers.experts import SparseMLP, StackedLinear
from nanovllm.layers.linear import WeightModule
from nanovllm.layers.state_layer import StateLayer
from nanovllm.worker.model_loader import make_modules
from nanovllm.worker.model_runner import ModelRunner
from nanovllm.worker.network import Network
from nanovllm.worker.step_output import StepOutput


class Work(NamedTuple):
    """What a step, or several, must do."""

    nbytes: float
    operations: Counter[int]
    """By the bits of the weights."""

    def reading(self, rates: Rates) -> float:
        """Return the seconds for the bytes."""
        return self.nbytes / rates.bytes_per_second

    def computing(self, rates: Rates) -> float:
        """Return the seconds for the operations."""
        return sum(count / rates.multiplying(bits) for bits, count in self.operations.items())

    def limit(self, rates: Rates) -> float:
        """Return the longer of both."""
        return max(self.reading(rates), self.computing(rates))


class Matrices(NamedTuple):
    """Weights that are read by the same steps, together."""

    bits: int
    numbers: int
    nbytes: int
    is_head: bool = False
    experts: tuple[int, int] | None = None
    """How many there are, and how many a token has; None: all tokens use the weight."""

    def add(self, work: Work, num_tokens: int, num_sampled: int) -> Work:
        """Return `work` with that of a step."""
        tokens = num_sampled if self.is_head else num_tokens
        numbers, used = self.numbers * tokens, 1.0
        if self.experts is not None:  # the mean if each expert is as likely as any other
            count, chosen = self.experts
            numbers = numbers * chosen // count
            used = 1 - (1 - chosen / count) ** tokens
        work.operations[self.bits] += 2 * numbers
        return work._replace(nbytes=work.nbytes + (self.nbytes * used if tokens else 0))


class Steps:
    """The work of a loaded network's steps."""

    def __init__(self, network: Network) -> None:
        model = network.model
        self._matrices = list(_matrices(network))
        self._attention = [layer for layer in model.modules() if isinstance(layer, Attention)]
        self._states = [layer for layer in model.modules() if isinstance(layer, StateLayer)]

    @property
    def bits(self) -> set[int]:
        """The bits of the weights."""
        return {each.bits for each in self._matrices}

    def work(self, rows: Iterable[Row]) -> Work:
        """Return the work of a step."""
        rows = list(rows)
        tokens = sum(row.num_scheduled_tokens for row in rows)
        sampled = sum(row.samples for row in rows)
        work = Work(0.0, Counter())
        for matrices in self._matrices:
            work = matrices.add(work, tokens, sampled)
        nbytes = work.nbytes
        for row in rows:
            for layer in self._attention:
                kv_bytes, operations = attention_work(layer, row.num_computed_tokens, row.end)
                nbytes += kv_bytes
                work.operations[attention_bits(layer)] += operations
            for state in self._states:
                nbytes += 2 * sum(part.nbytes for part in state.parts)
                numbers = sum(torch.Size(part.shape).numel() for part in state.parts)
                # At least a product with what comes in, and one with what asks.
                work.operations[32] += 4 * numbers * row.num_scheduled_tokens
        return work._replace(nbytes=nbytes)


def _matrices(network: Network) -> Iterator[Matrices]:
    """Yield the weights of each form and use."""
    shapes = make_modules(network.model_config, network.max_model_len, torch.device("meta"))
    shape_of = dict(shapes.named_modules())
    chosen: dict[WeightModule, tuple[int, int]] = {
        linear: (mlp.experts.down_proj.num_experts, mlp.gate.choice.top_k)
        for mlp in network.model.modules()
        if isinstance(mlp, SparseMLP)
        for linear in mlp.experts.modules()
        if isinstance(linear, StackedLinear)
    }
    found: dict[Any, list[int]] = {}
    for name, module in network.model.named_modules():
        is_head = isinstance(module, ParallelLMHead)
        twin = shape_of.get(name)
        if (
            not isinstance(module, WeightModule)
            or not isinstance(twin, WeightModule)
            or twin.weight is None
        ):
            continue
        if isinstance(module, VocabParallelEmbedding) and not is_head:
            continue  # a row a token
        numbers = twin.weight.numel()
        nbytes = sum(tensor.nbytes for tensor in weight_tensors(module))
        bits = weight_bits(module, numbers)
        sums = found.setdefault((bits, is_head, chosen.get(module)), [0, 0])
        sums[0] += numbers
        sums[1] += nbytes
    for (bits, is_head, experts), (numbers, nbytes) in found.items():
        yield Matrices(bits, numbers, nbytes, is_head, experts)


def network_of(llm: LLM) -> Network:
    """Return the network of an engine in this process."""
    [network] = llm.engine.executor.call_all(lambda runner: runner.network)
    assert isinstance(network, Network)
    return network


def weights_meter(network: Network) -> RateMeter:
    """Return the meter of the rates at which this network's weights can be read, and multiplied."""
    tensors = {
        tensor.data_ptr(): tensor
        for module in network.model.modules()
        if isinstance(module, WeightModule)
        for tensor in weight_tensors(module)
        if tensor.layout == torch.strided and tensor.is_contiguous()  # not in oneDNN's layout
    }
    return RateMeter(list(tensors.values()))


def reset_peak() -> None:
    """Set the process's peak to what it holds now (proc_pid_clear_refs(5))."""
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")


def peak_megabytes() -> float:
    """Return the peak resident memory since `reset_peak`, in MB of a million bytes."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text(encoding="utf-8"))
    assert found is not None
    return int(found[1]) * 1024 / 1e6


class Round(NamedTuple):
    """One run of a case: its seconds, its limit, and the seconds for all its bytes and operations.

    A step's limit is the longer of its own two, so the limit of all is at least both sums.
    """

    seconds: float
    limit: float
    reading: float
    computing: float

    @property
    def share(self) -> float:
        """The share of the limit that is reached."""
        return self.limit / self.seconds


class Step(NamedTuple):
    """What was run, and when it began."""

    rows: list[Row]
    start: float


def parts_of(
    name: str, steps: list[Step], start: float, end: float
) -> dict[str, tuple[list[Step], float]]:
    """Return the parts of a case that are judged apart, with their seconds: of a long one of
    one turn its prompts, and the steps after the last prompt.

    Args:
        start, end: of the whole case, in seconds; its first step begins later.
    """
    decoding = len(steps)
    while decoding and all(row.num_scheduled_tokens == 1 for row in steps[decoding - 1].rows):
        decoding -= 1
    if name not in LONG_CASES or CASES[name].num_turns > 1 or decoding in (0, len(steps)):
        return {name: (steps, end - start)}
    fork = steps[decoding].start
    prompts, rest = steps[:decoding], steps[decoding:]
    return {f"{name}, prompts": (prompts, fork - start), f"{name}, rest": (rest, end - fork)}


@contextmanager
def _observed(steps: list[Step]) -> Iterator[None]:
    """Add each step inside to `steps`."""
    run_rows = ModelRunner.run_rows

    def observed(self: ModelRunner, rows: list[Row]) -> StepOutput:
        steps.append(Step(rows, time.perf_counter()))
        return run_rows(self, rows)

    with mock.patch.object(ModelRunner, "run_rows", observed):
        yield


def run_case(llm: LLM, case: Case, seed: str) -> None:
    """Run a case's requests."""
    for prompts, output_lens in case.requests(seed):
        params = [
            SamplingParams(max_tokens=length, ignore_eos=True, **case.sampling)  # type: ignore[arg-type]
            for length in output_lens
        ]
        llm.generate(prompts, params, use_tqdm=False)


def measure(
    llm: LLM, name: str, meter: RateMeter, rounds: int
) -> tuple[dict[str, tuple[Round, Work]], float]:
    """Run a case; return of each of its parts the round with the median share and its work, and the
    peak of memory in MB.

    Rates are measured before and after each round.
    """
    work_of = Steps(network_of(llm))
    found: dict[str, list[tuple[Round, Work]]] = {}
    reset_peak()
    before = meter.measure()
    for seed in range(rounds):
        steps: list[Step] = []
        start = time.perf_counter()
        with _observed(steps):
            run_case(llm, CASES[name], f"{name} {seed}")
        end = time.perf_counter()
        after = meter.measure()
        rates, before = before.best(after), after
        for part, (own, seconds) in parts_of(name, steps, start, end).items():
            works = [work_of.work(step.rows) for step in own]
            sums = (
                sum(work.limit(rates) for work in works),
                sum(work.reading(rates) for work in works),
                sum(work.computing(rates) for work in works),
            )
            operations = sum((work.operations for work in works), Counter())
            whole = Work(sum(work.nbytes for work in works), operations)
            found.setdefault(part, []).append((Round(seconds, *sums), whole))
    middle = (rounds - 1) // 2
    parts = {part: sorted(each, key=lambda one: one[0].share) for part, each in found.items()}
    peak = peak_megabytes() - BUFFER_BYTES / 1e6
    return {part: each[middle] for part, each in parts.items()}, peak


def main() -> None:
    """Run each case and print its row."""
    parser = make_parser("limit", __doc__)
    parser.add_argument("--gguf", choices=GGUF_TYPES, help="a random GGUF file of --model's shape")
    parser.add_argument("--quantization")
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=USUAL)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        model, load_format = prepared(args.model, args.gguf, directory)
        reset_peak()
        llm = LLM(
            model,
            load_format=load_format,
            quantization=args.quantization,
            kv_cache_dtype=args.kv_cache_dtype,
            max_model_len=longest(args.cases),
        )
    form = args.gguf or args.quantization or "as stored"
    loading = peak_megabytes()
    meter = weights_meter(network_of(llm))
    print(f"{described(args.model)}, {form}; {processor_name()}, {torch.get_num_threads()} threads")
    print(f"{meter.measure().summary()}; peak while loading {loading:.0f} MB\n")
    headings = "case", "seconds", "limit, s", "share", "GB", "to read, s", "Gop", "to compute, s"
    table = Table(*headings, "peak, MB")
    run_case(llm, WARM_UP, "warm-up")
    for name in args.cases:
        parts, peak = measure(llm, name, meter, args.rounds)
        for part, (one, work) in parts.items():
            gigaoperations = sum(work.operations.values()) / 1e9
            reading = f"{work.nbytes / 1e9:.1f}", one.reading
            computing = f"{gigaoperations:.0f}", one.computing
            share = f"{one.share:.0%}"
            table.row(part, one.seconds, one.limit, share, *reading, *computing, f"{peak:.0f}")
    llm.shutdown()


if __name__ == "__main__":
    main()
