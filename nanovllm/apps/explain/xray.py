"""`Xray`: the shapes, bytes, operations and seconds of each part of a network, by torch's hooks.

The least seconds of a part are those to read its weights and KV, or to compute its products, at the
rates that this machine showed before: as in `benchmarks.limit`. Activations count as cached.
"""

import contextlib
import functools
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from nanovllm.apps.explain.rates import RateMeter, Rates
from nanovllm.apps.explain.story import LayerPart
from nanovllm.apps.explain.work import attention_bits, attention_work, weight_bits, weight_tensors
from nanovllm.attention.batch import Batch
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.layers.attention import Attention
from nanovllm.layers.embed_head import ParallelLMHead, VocabParallelEmbedding
from nanovllm.layers.experts import Experts
from nanovllm.layers.layernorm import LayerNorm, RMSNorm
from nanovllm.layers.linear import WeightModule
from nanovllm.worker.model_runner import ModelRunner


class Work(NamedTuple):
    """What a call must move and compute."""

    weight_bytes: int = 0
    """Of weights and KV."""
    operations: int = 0
    bits: int = 16
    """Of the numbers that it multiplies."""


class _Sums(NamedTuple):
    """What calls moved and computed, and the least seconds for it."""

    nbytes: int = 0
    operations: int = 0
    least_seconds: float = 0.0

    def plus(self, other: "_Sums") -> "_Sums":
        return _Sums(
            self.nbytes + other.nbytes,
            self.operations + other.operations,
            self.least_seconds + other.least_seconds,
        )


_NOTHING = _Sums()


@dataclass
class _Calls:
    """The calls of one part in a step."""

    inputs: str
    outputs: str
    calls: int = 0
    seconds: float = 0.0
    sums: _Sums = _NOTHING


@dataclass
class _Frame:
    """A call that has begun, and what the parts in it did."""

    start: float
    sums: _Sums | None = None


class Xray:
    """Watches the parts of a network until `detach`.

    Args:
        rates: of this machine; None: they were not measured, and parts have no share.
        wait: returns when the device has done all work launched so far.
    """

    def __init__(self, model: nn.Module, rates: Rates | None, wait: Callable[[], object]) -> None:
        self.rates = rates
        self._wait = wait
        self._order: dict[str, None] = {}
        self._calls: dict[str, _Calls] = {}
        self._stack: list[_Frame] = []
        self._hooks = contextlib.ExitStack()
        for name, module in model.named_modules():
            if name == "model":  # all but the head, which is called apart: "network" is the same
                continue
            label = re.sub(r"\.\d+(?=\.|$)", ".*", name).removeprefix("model.") or "network"
            self._order[label] = None
            begin = module.register_forward_pre_hook(lambda *_: self._begin())
            end = module.register_forward_hook(functools.partial(self._end, label))
            self._hooks.callback(begin.remove)
            self._hooks.callback(end.remove)
            if isinstance(module, RMSNorm | LayerNorm):
                self._watch_add_norm(label, module)

    def detach(self) -> None:
        """Remove the hooks."""
        self._hooks.close()

    def take(self) -> list[LayerPart]:
        """Return the parts of the steps since the last call, in the order of the network."""
        found, self._calls = self._calls, {}
        return [
            LayerPart(
                label,
                calls.calls,
                calls.inputs,
                calls.outputs,
                calls.sums.nbytes,
                calls.sums.operations,
                calls.seconds,
                self._share(calls),
            )
            for label in self._order
            if (calls := found.get(label)) is not None
        ]

    def _share(self, calls: _Calls) -> float | None:
        least = calls.sums.least_seconds
        return least / calls.seconds if least else None

    def _watch_add_norm(self, label: str, module: RMSNorm | LayerNorm) -> None:
        """Watch the method by which layers call a norm; hooks see calls of the module alone."""
        add_norm = module.add_norm

        def watched(x: torch.Tensor | None, residual: torch.Tensor) -> Any:
            self._begin()
            found = add_norm(x, residual)
            self._end(label, module, (x, residual), found)
            return found

        module.add_norm = watched  # type: ignore[method-assign]
        self._hooks.callback(vars(module).pop, "add_norm")

    def _begin(self) -> None:
        self._wait()
        self._stack.append(_Frame(time.perf_counter()))

    def _end(self, label: str, module: nn.Module, arguments: Any, result: Any) -> None:
        self._wait()
        frame = self._stack.pop()
        seconds = time.perf_counter() - frame.start
        inputs, outputs = _tensors(arguments), _tensors(result)
        sums = frame.sums
        if sums is None:
            work = _work(module, arguments)
            moved = sum(tensor.nbytes for tensor in (*inputs, *outputs))
            least = self._least_seconds(work)
            sums = _Sums(work.weight_bytes + moved, work.operations, least)
        calls = self._calls.get(label)
        if calls is None:
            calls = self._calls[label] = _Calls(_shapes(inputs), _shapes(outputs))
        calls.calls += 1
        calls.seconds += seconds
        calls.sums = calls.sums.plus(sums)
        if self._stack:
            parent = self._stack[-1]
            parent.sums = (parent.sums or _NOTHING).plus(sums)

    def _least_seconds(self, work: Work) -> float:
        if self.rates is None:
            return 0.0
        reading = work.weight_bytes / self.rates.bytes_per_second
        return max(reading, work.operations / self.rates.multiplying(work.bits))


def _tensors(value: Any) -> list[torch.Tensor]:
    """Return the tensors among arguments or results; what is in a batch counts as none."""
    items = value if type(value) in (list, tuple) else [value]
    return [item for item in items if isinstance(item, torch.Tensor)]


def _shapes(tensors: list[torch.Tensor]) -> str:
    return ", ".join(f"{list(t.shape)} {str(t.dtype).removeprefix('torch.')}" for t in tensors)


def _work(module: nn.Module, arguments: Any) -> Work:
    """Return the work of one call of a part without parts."""
    inputs = _tensors(arguments)
    if isinstance(module, Attention):
        batch = next(each for each in arguments if isinstance(each, Batch))
        batch = batch.others[module.group - 1] if module.group else batch
        assert batch.lengths is not None
        works = [
            attention_work(module, end - count, end)
            for count, end in zip(*batch.lengths, strict=True)
        ]
        nbytes, operations = (sum(column) for column in zip(*works, strict=True))
        return Work(nbytes, operations, attention_bits(module))
    if isinstance(module, VocabParallelEmbedding) and not isinstance(module, ParallelLMHead):
        row_bytes = sum(tensor.nbytes for tensor in weight_tensors(module)) // module.output_size
        return Work(row_bytes * inputs[0].numel())
    if isinstance(module, WeightModule):
        numbers = module.output_size * inputs[0].shape[-1]
        nbytes = sum(tensor.nbytes for tensor in weight_tensors(module))
        num_tokens = inputs[0].numel() // inputs[0].shape[-1]
        return Work(nbytes, 2 * numbers * num_tokens, weight_bits(module, numbers))
    if isinstance(module, Experts):
        return _expert_work(module, arguments)
    return Work(sum(parameter.nbytes for parameter in module.parameters()))


def _expert_work(module: Experts, arguments: Any) -> Work:
    """Return the work of the experts that the tokens of a call have: the others are not read."""
    x, routing = arguments
    gate_up, down = module.gate_up_proj, module.down_proj
    numbers = x.shape[-1] * (gate_up.output_size + module.size * down.num_experts)
    nbytes = sum(tensor.nbytes for each in (gate_up, down) for tensor in weight_tensors(each))
    num_used = len(routing.ids.unique())
    return Work(
        nbytes * num_used // down.num_experts,
        2 * numbers // down.num_experts * routing.ids.numel(),
        weight_bits(gate_up, gate_up.output_size * x.shape[-1]),
    )


@contextlib.contextmanager
def xrayed(engine: LLMEngine) -> Iterator[Xray]:
    """Watch the parts of an engine's network until the block ends.

    The engine must run layer by layer (enforce_eager): other ways call no modules.
    """
    [xray] = engine.executor.call_all(_attach)
    try:
        yield xray
    finally:
        xray.detach()


def _attach(runner: ModelRunner) -> Xray:
    assert not runner.step_runners
    model = runner.network.model
    rates = None
    if runner.platform.in_host_memory:
        matrices = [module for module in model.modules() if isinstance(module, WeightModule)]
        weights = [tensor for each in matrices for tensor in weight_tensors(each)]
        by_address = {each.data_ptr(): each for each in weights if each.is_contiguous()}
        rates = RateMeter(list(by_address.values())).measure()
    return Xray(model, rates, runner.platform.synchronize)
