"""Fused steps give the logits and the cache of the layers, in at most 150 launches, and are chosen
where they are faster. Without a GPU the kernels are interpreted.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.interpreter import GridExecutor

from nanovllm import SamplingParams
from nanovllm.attention.batch import Batch, HostLengths
from nanovllm.attention.spec import AttentionOptions, AttentionSpec
from nanovllm.attention.torch_sdpa import TorchBackend
from nanovllm.attention.triton import TritonBackend
from nanovllm.core.worker_info import WorkerInfo
from nanovllm.features.graphs import fused_step
from nanovllm.features.graphs.cuda_capture import CUDACapture
from nanovllm.features.graphs.cuda_graph import GraphRunner
from nanovllm.features.graphs.fused_step import (
    SIZES,
    FusedStep,
    faster_logits,
    unsupported,
    unsupported_model,
)
from nanovllm.features.quantization.fp8 import FP8
from nanovllm.features.speculation.proposers.eagle3_head import capture_features
from nanovllm.features.speculation.proposers.proposer import Proposer
from nanovllm.kernels.torch_math import NORM_WIDE
from nanovllm.kernels.triton.kernels import TritonKernels
from nanovllm.layers.activation import ActAndMul
from nanovllm.layers.attention import Attention
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.rotary_embedding import RopeConfig
from nanovllm.models.decoder import DecoderForCausalLM
from nanovllm.models.model_config import ModelConfig
from nanovllm.models.registry import model_class
from nanovllm.platform import Platform, cuda
from nanovllm.worker import attention_groups
from nanovllm.worker.device_tables import DeviceTables
from tests.closeness import assert_close
from tests.graphs.fake_graphs import StepKernels, use_fake_graphs
from tests.graphs.test_cuda_graph import generate
from tests.kernels.triton.inputs import CUDA, DEVICE
from tests.kernels.triton.interpreter import patch_interpreter
from tests.kernels.triton.test_ops import assert_as_good

pytestmark = pytest.mark.usefixtures("inference_mode")
without_gpu = pytest.mark.skipif(CUDA, reason="needs Triton's interpreter, which a GPU turns off")
BLOCK_SIZE, NUM_BLOCKS = 16, 60
SMALL = ModelConfig(
    architecture="Qwen3ForCausalLM",
    vocab_size=203,
    hidden_size=48,
    intermediate_size=77,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    rms_norm_eps=1e-6,
    rope=RopeConfig(theta=1e4),
    max_position=512,
    tie_word_embeddings=True,
    dtype=torch.float16,
)
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "qwen2": {"architecture": "Qwen2ForCausalLM", "num_heads": 2},
    "llama": {
        "architecture": "LlamaForCausalLM",
        "fields": {"attention_bias": True, "mlp_bias": True},
        "tie_word_embeddings": False,
    },
}

patch_interpreter()


@pytest.fixture
def inference_mode() -> Any:
    with torch.inference_mode():
        yield


def spec_of(config: ModelConfig, device: torch.device = DEVICE) -> AttentionSpec:
    heads = config.num_heads, config.num_kv_heads, config.head_dim
    return AttentionSpec(*heads, config.dtype, device, BLOCK_SIZE)


class Model:
    """A random model with one of its attention backends and a KV cache of random numbers."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, backend: Any) -> None:
        config = dataclasses.replace(config, dtype=dtype)
        model = model_class(config)(config, 512)
        assert isinstance(model, DecoderForCausalLM)
        self.module = model.to(DEVICE, dtype).requires_grad_(False)
        generator = torch.Generator().manual_seed(0)
        for name, parameter in model.named_parameters():
            scale, base = (0.5, 1.0) if "norm" in name else (1.5 / parameter.shape[-1] ** 0.5, 0.0)
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.data = (base + scale * noise).half().to(DEVICE, dtype)
        self.backend = backend(spec_of(config))
        shape = self.backend.kv_cache_shape(NUM_BLOCKS)
        for module in model.modules():
            if isinstance(module, Attention):
                cache = torch.randn(shape, generator=generator).half().to(DEVICE, dtype)
                module.bind(self.backend, cache)
            if isinstance(module, RMSNorm | ActAndMul) and backend is TritonBackend:
                module.kernels = TritonKernels()

    def unfused(self, batch: Batch) -> torch.Tensor:
        batch = dataclasses.replace(batch, metadata=self.backend.plan(batch))
        logits = self.module.compute_logits(self.module(batch))
        assert logits is not None
        return logits

    def fused(self, batch: Batch) -> torch.Tensor:
        assert unsupported_model(self.module, self.backend) is None
        return FusedStep(self.module, self.backend).compute_logits(batch)

    def faster(self, unfused: Any, num_blocks: int = NUM_BLOCKS, max_tokens: int = 16) -> Any:
        sizes = {"num_blocks": num_blocks, "max_model_len": 512, "max_tokens": max_tokens}
        return faster_logits(unfused, self.module, self.backend, **sizes)

    def caches(self) -> list[torch.Tensor]:
        return [m.kv_cache for m in self.module.modules() if isinstance(m, Attention)]


def make_batch(lengths: list[int]) -> Batch:
    """Return rows of one token of sequences of their own, except that equal neighbours plus one
    share a sequence: 5, 6, 7 are three tokens of one.
    """
    positions = torch.tensor(lengths) - 1
    owners = [0]
    for before, length in itertools.pairwise(lengths):
        owners.append(owners[-1] + (length != before + 1))
    width = max(lengths) // BLOCK_SIZE + 1
    blocks = torch.randperm(NUM_BLOCKS, generator=torch.Generator().manual_seed(1)).int()
    tables = blocks[: width * (owners[-1] + 1)].view(-1, width)[owners]
    block = tables.gather(1, (positions // BLOCK_SIZE)[:, None])[:, 0].long()
    return Batch(
        input_ids=(positions * 31 % 203).to(DEVICE),
        positions=positions.to(DEVICE),
        slot_mapping=(block * BLOCK_SIZE + positions % BLOCK_SIZE).to(DEVICE),
        cu_seqlens_q=torch.arange(len(lengths) + 1, dtype=torch.int32, device=DEVICE),
        seq_lens=torch.tensor(lengths, dtype=torch.int32, device=DEVICE),
        block_tables=tables.to(DEVICE),
    )


def in_eager_mode(batch: Batch) -> Batch:
    """Return the batch with what the plain torch backend needs of the host."""
    lengths = tuple(batch.seq_lens.tolist())
    return dataclasses.replace(batch, lengths=HostLengths((1,) * len(lengths), lengths))


@pytest.mark.parametrize(
    ("family", "lengths"),
    [
        ("qwen3", [9]),
        ("qwen2", [5, 6, 7, 50]),
        ("llama", [17, 18, 1, 33]),
    ],
    ids=str,
)
def test_the_logits_and_the_cache_of_the_layers(family: str, lengths: list[int]) -> None:
    """Both round the same numbers to the same dtype, so both are as near to float64."""
    config = dataclasses.replace(SMALL, **FAMILIES[family])
    batch = make_batch(lengths)
    exact = Model(config, torch.float64, TorchBackend)
    expected = exact.unfused(in_eager_mode(batch))
    layers, ours = (Model(config, torch.float16, TritonBackend) for _ in range(2))
    before = [cache.clone() for cache in ours.caches()]
    theirs, found = layers.unfused(batch), ours.fused(batch)
    assert_as_good(found, theirs, expected)
    slots = batch.slot_mapping
    for old, *caches in zip(before, *(m.caches() for m in (ours, layers, exact)), strict=True):
        changed = (old != caches[0]).flatten(1, 2).any(-1).any(-1).any(0)
        assert set(changed.nonzero()[:, 0].tolist()) == set(slots.tolist())
        assert_as_good(*(cache.flatten(1, 2)[:, slots] for cache in caches))


@pytest.mark.skipif(not CUDA, reason="needs a CUDA GPU")
def test_replays_of_a_graph() -> None:
    """Each replay computes other tokens: a kernel that did not wait for the previous one would read
    numbers of the last replay. A row has the same bits alone and among 4.
    """
    model = Model(dataclasses.replace(SMALL, hidden_size=1024), torch.bfloat16, TritonBackend)
    fused = FusedStep(model.module, model.backend).compute_logits
    batch = make_batch([3 + 2 * row for row in range(4)])
    first = dataclasses.replace(
        batch,
        **{name: getattr(batch, name)[:1] for name in ("input_ids", "positions", "slot_mapping")},
        cu_seqlens_q=batch.cu_seqlens_q[:2],
        seq_lens=batch.seq_lens[:1],
        block_tables=batch.block_tables[:1],
    )
    (graph, logits), (alone, row) = (
        CUDACapture(DEVICE)(functools.partial(fused, rows)) for rows in (batch, first)
    )
    assert logits is not None
    assert row is not None
    for _ in range(500):
        batch.input_ids.random_(203)
        alone.replay()
        graph.replay()
        assert torch.equal(row[0], logits[0])
        expected = model.unfused(batch)
        assert_close(logits, expected, of_largest=0.05)


# --- launches


class LaunchCount(TorchDispatchMode):
    """Counts what a GPU would launch, and computes nothing: all tensors are on the meta device."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view and "empty" not in func._schema.name:
            self.names.append(func._schema.name)
        return func(*args, **(kwargs or {}))


def launches(config: ModelConfig, rows: int, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the names of the kernels of a whole step in a graph."""
    meta = torch.device("meta")
    monkeypatch.setattr(cuda.CUDA, "staging", Platform.staging)  # pinned memory needs a GPU
    monkeypatch.setattr(cuda.CUDA, "runs_ahead", False)  # no copies: there is nothing to copy
    with meta:
        model = model_class(config)(config, 512).to(config.dtype)
    assert isinstance(model, DecoderForCausalLM)
    backend = TritonBackend(spec_of(config, meta))
    for module in model.modules():
        if isinstance(module, Attention):
            shape = backend.kv_cache_shape(NUM_BLOCKS)
            module.bind(backend, torch.empty(shape, dtype=config.dtype, device=meta))
    tables = DeviceTables(
        WorkerInfo(NUM_BLOCKS, BLOCK_SIZE, 512, config.vocab_size, 64),
        16,
        cuda.CUDA(meta),
        StepKernels(),
    )
    count = LaunchCount()
    monkeypatch.setattr(
        GridExecutor, "__call__", lambda self, *_, **__: count.names.append(self.fn.__name__)
    )

    def capture(step: Callable[[], Any]) -> Any:
        with count:
            return None, step()

    fused = FusedStep(model, backend).compute_logits
    GraphRunner(fused, backend, tables, 16, capture).capture([rows])
    return count.names


@without_gpu
@pytest.mark.parametrize("rows", [1, 4])
def test_a_step_has_at_most_150_launches(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the shape of Qwen3-0.6B."""
    config = dataclasses.replace(
        SMALL,
        dtype=torch.bfloat16,
        vocab_size=151936,
        hidden_size=1024,
        intermediate_size=3072,
        num_layers=28,
        num_heads=16,
        num_kv_heads=8,
        head_dim=128,
    )
    names = launches(config, rows, monkeypatch)
    assert len(names) <= 150
    layer = [
        "_norm_linear",
        "_attend_rows",
        "_linear_partials",
        "_norm_linear",
        "_linear_partials",
    ]
    start = names.index("_norm_linear")
    assert names[start : start + 28 * 5] == layer * 28


# --- what is refused


@without_gpu
def test_models_with_other_layers_are_refused() -> None:
    """What differs may be an argument of a part, or a part of another class."""
    model = Model(SMALL, torch.float16, TritonBackend)
    layer = model.module.model.layers[0]
    attention, mlp = layer.self_attn, layer.mlp
    for part, name, value, reason in (
        (attention.attn, "options", AttentionOptions(window=4), "attention has options"),
        (mlp.act, "activation", "gelu_tanh", "the activation is gelu_tanh"),
        (layer.input_layernorm, "kind", NORM_WIDE, "a norm is of another kind"),
        (layer.input_layernorm, "multiplier", 0.5, "a norm is of another kind"),
        (attention.rotary_emb, "interleaved", True, "heads rotate in another way"),
        (attention.rotary_emb, "cos_sin", torch.ones(9, 8), "heads rotate in another way"),
        (layer, "self_attn", torch.nn.Identity(), "Identity is no plain SelfAttention"),
        (layer, "mlp", torch.nn.Identity(), "Identity is no plain GatedMLP"),
    ):
        kept = getattr(part, name)
        setattr(part, name, value)
        assert reason in str(unsupported_model(model.module, model.backend))
        setattr(part, name, kept)
    assert unsupported_model(model.module, model.backend) is None


@without_gpu
def test_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    def reason(model: Any, backend: Any) -> str:
        found = unsupported_model(model, backend)
        assert found is not None
        return found

    def of(**changes: Any) -> Model:
        return Model(dataclasses.replace(SMALL, **changes), torch.float16, TritonBackend)

    model = of()
    module, backend = model.module, model.backend
    assert unsupported_model(module, backend) is None
    assert unsupported(module, backend) == "needs a CUDA GPU"
    assert reason(torch.nn.Linear(1, 1), backend) == "Linear is no dense decoder"
    assert "torch has another KV cache" in reason(module, TorchBackend(spec_of(SMALL)))
    narrow = TritonBackend(dataclasses.replace(backend.spec, kv_dtype=FP8))
    assert "8 bits" in reason(module, narrow)
    wide = TritonBackend(dataclasses.replace(backend.spec, dtype=torch.float32))
    assert "float32" in reason(module, wide)
    other = of(head_dim=24)
    assert "head_dim 24" in reason(other.module, other.backend)
    capture_features(module, [1], torch.zeros(8, SMALL.hidden_size))
    assert "draft head" in reason(module, backend)
    other = of()
    linear = other.module.model.layers[0].self_attn.qkv_proj
    linear.replace_weight(SimpleNamespace())
    assert "quantised" in reason(other.module, other.backend)
    monkeypatch.setattr(fused_step, "tensor_parallel", lambda: SimpleNamespace(size=2))
    assert "tensor_parallel_size is 2" in reason(module, backend)


@without_gpu
def test_an_unsupported_model_is_not_fused(caplog: pytest.LogCaptureFixture) -> None:
    model = Model(SMALL, torch.float16, TritonBackend)
    with caplog.at_level("INFO", logger="nanovllm.features.graphs.fused_step"):
        assert model.faster(model.unfused) == model.unfused
    assert "not fused: needs a CUDA GPU" in caplog.text


# --- the choice


class Timed:
    """Stands for a GPU: a replay of a graph takes as long as the test says.

    Args:
        fused_seconds: of a number of rows and the length of their sequences; unfused steps take 1.
        fused_logits: what the fused kernels return for a number of rows; unfused steps return ones.
    """

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        fused_seconds: Callable[[int, int], float],
        fused_logits: Callable[[int], torch.Tensor] = lambda rows: torch.ones(rows, 3),
    ) -> None:
        self.ran: list[tuple[str, Batch]] = []
        self.captured: list[tuple[str, int]] = []
        self._fused_seconds = fused_seconds
        self._took = 0.0

        def fused(step: FusedStep, batch: Batch) -> torch.Tensor:
            self.ran.append(("fused", batch))
            return fused_logits(len(batch.positions))

        monkeypatch.setattr(fused_step, "unsupported", unsupported_model)
        monkeypatch.setattr(fused_step, "CUDACapture", lambda device: self.capture)
        monkeypatch.setattr(fused_step, "measure_seconds", self.measure_seconds)
        monkeypatch.setattr(FusedStep, "compute_logits", fused)
        self.model = Model(SMALL, torch.float16, TritonBackend)

    def unfused(self, batch: Batch) -> torch.Tensor:
        self.ran.append(("unfused", batch))
        return torch.ones(len(batch.positions), 3)

    def capture(self, step: Callable[[], Any]) -> Any:
        logits = step()
        name, batch = self.ran[-1]
        rows = len(batch.positions)
        self.captured.append((name, rows))

        def replay() -> None:
            length = int(batch.seq_lens[0])
            assert (batch.positions == length - 1).all()
            blocks = batch.block_tables[:, (length - 1) // BLOCK_SIZE].long()
            slots = blocks * BLOCK_SIZE + (length - 1) % BLOCK_SIZE
            assert torch.equal(batch.slot_mapping, slots)
            assert len(slots.unique()) == rows
            self._took = self._fused_seconds(rows, length) if name == "fused" else 1.0

        return SimpleNamespace(replay=replay), logits

    def measure_seconds(self, run: Any, sizes: Any, platform: Any) -> list[tuple[int, float]]:
        return [(run(size), (size, self._took))[1] for size in sizes]

    def ways(self, max_tokens: int = 8) -> list[str]:
        """Return how steps of 1 to 5 rows are computed."""
        compute_logits = self.model.faster(self.unfused, max_tokens=max_tokens)
        for rows in range(1, 6):
            compute_logits(make_batch([1] * rows))
        return [name for name, _ in self.ran[-5:]]


@without_gpu
@pytest.mark.parametrize(
    ("fused_seconds", "sizes"),
    [
        (lambda rows, length: 0.9, SIZES),
        (lambda rows, length: 1.0, ()),
        (lambda rows, length: 0.5 + (rows == 2), (1,)),
        (lambda rows, length: 0.5 + (rows > 2 and length > 1), (1, 2)),
    ],
    ids=["faster", "no faster", "slower at 2", "slower from 4 on if long"],
)
def test_the_faster_way_is_chosen_by_size(
    fused_seconds: Callable[[int, int], float],
    sizes: tuple[int, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    timed = Timed(monkeypatch, fused_seconds)
    size_of = [1, 2, 4, 4, 5]
    assert timed.ways() == ["fused" if size in sizes else "unfused" for size in size_of]
    ways = ("fused", "unfused")
    timed_sizes = SIZES[: len(sizes) + 1]  # up to the first at which the layers are faster
    assert timed.captured == [(way, size) for size in timed_sizes for way in ways]


@without_gpu
def test_sizes_that_no_step_has_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    timed = Timed(monkeypatch, lambda rows, length: 0.5)
    assert timed.ways(max_tokens=3)[:4] == ["fused"] * 4
    assert [rows for _, rows in timed.captured] == [1, 1, 2, 2, 4, 4]
    timed.captured.clear()
    timed.model.faster(timed.unfused, num_blocks=7)
    assert {rows for _, rows in timed.captured} == {1, 2}


@without_gpu
@pytest.mark.parametrize("broken", ["wrong", "nan", "raises"])
def test_kernels_that_compute_something_else_are_off(
    broken: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever the compiler or the driver of this GPU do: steps are then as without the kernels."""

    def fused_logits(rows: int) -> torch.Tensor:
        if rows == 4 and broken == "raises":
            raise RuntimeError("ptxas fatal")
        wrong = {"wrong": 1.2, "nan": float("nan"), "raises": 1.0}[broken]
        return torch.full((rows, 3), wrong if rows == 4 else 1.0)

    timed = Timed(monkeypatch, lambda rows, length: 0.5, fused_logits)
    assert timed.ways() == ["unfused"] * 5
    expected = "ptxas fatal" if broken == "raises" else "logits of 4 rows differ"
    assert expected in caplog.text


@without_gpu
@pytest.mark.parametrize("wrong", [False, True])
def test_logits_of_equal_lengths_are_compared(
    wrong: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Symptom on the first GPU: whether the kernels were on depended on which of the two lengths
    each way happened to be timed with last. The graphs share the memory of their logits.
    """
    timed = Timed(monkeypatch, lambda rows, length: 0.5)
    memory = torch.zeros(16, 3, dtype=torch.float32 if wrong else torch.float16)

    def capture(step: Callable[[], Any]) -> Any:
        graph, _ = timed.capture(step)
        name, batch = timed.ran[-1]
        logits = memory[: len(batch.positions)]

        def replay() -> None:
            graph.replay()
            off = 1.2 if wrong and name == "fused" else 1.0
            logits.fill_(off * float(batch.seq_lens[0]))

        return SimpleNamespace(replay=replay), logits

    def measure_seconds(run: Any, sizes: Any, platform: Any) -> list[tuple[int, float]]:
        ends_with_long = timed.ran[-1][0] == "unfused"
        order = sorted(sizes, reverse=not ends_with_long)
        seconds = dict(timed.measure_seconds(run, order, platform))
        return [(size, seconds[size]) for size in sizes]

    monkeypatch.setattr(fused_step, "CUDACapture", lambda device: capture)
    monkeypatch.setattr(fused_step, "measure_seconds", measure_seconds)
    assert timed.ways() == (["unfused"] * 5 if wrong else ["fused"] * 4 + ["unfused"])
    assert ("logits of 1 rows differ" in caplog.text) == wrong


# --- the engine


@without_gpu
def test_the_engine_generates_the_same_tokens(
    shared_checkpoint: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With drafts, which are rows of one sequence."""
    checkpoint = shared_checkpoint(
        vocab_size=103,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        head_dim=16,
        max_position_embeddings=64,
        eos_token_id=7,
    )
    prompts = [[1, 2, 3, 1, 2], [6] * 6]
    kinds = [{"temperature": 0.8}, {"temperature": 0.0, "logprobs": 1}]
    params = [SamplingParams(seed=i, max_tokens=4, **kind) for i, kind in enumerate(kinds)]
    options: dict[str, Any] = {"dtype": "float16", "max_num_seqs": 2, "num_kvcache_blocks": 16}
    options |= {"kvcache_block_size": 16, "max_num_batched_tokens": 16}
    expected = generate(checkpoint, (prompts, params), enforce_eager=True, **options)
    use_fake_graphs(monkeypatch)
    monkeypatch.setattr(
        attention_groups, "select_backend", lambda spec, kernels: TritonBackend(spec)
    )
    monkeypatch.setattr(fused_step, "unsupported", unsupported_model)
    monkeypatch.setattr(fused_step, "_is_faster", lambda *_: True)
    monkeypatch.setattr(Proposer, "add_costs", lambda self, info, *_: info)
    steps: list[int] = []
    compute_logits = FusedStep.compute_logits

    def watched(self: FusedStep, batch: Batch) -> torch.Tensor:
        steps.append(len(batch.positions))
        return compute_logits(self, batch)

    monkeypatch.setattr(FusedStep, "compute_logits", watched)
    drafts = {"method": "ngram", "num_speculative_tokens": 2}
    found = generate(
        checkpoint, (prompts, params), queue_depth=1, speculative_config=drafts, **options
    )
    assert found == expected
    assert set(steps) == {1, 2, 4}
