"""After an update an engine is one that loaded the new weights."""

import dataclasses
import os
import random
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from nanovllm import LLM, LoRARequest, SamplingParams
from nanovllm.errors import ConfigError, InvalidRequestError, UnsupportedModelError
from nanovllm.features.training import rank_weights as rank_module, writing
from nanovllm.features.training.packets import in_messages
from nanovllm.features.training.targets import Weight
from nanovllm.features.training.updates import Update
from nanovllm.kernels.cpu.library import library
from nanovllm.utils.distributed import tensor_parallel
from tests.checkpoints import make_fp8_checkpoint
from tests.every_case import EVERY_CASE
from tests.helpers import random_prompt, token_ids
from tests.lora.adapters import linears_of, write_adapter
from tests.test_native_invariance import MODEL, OTHER_FAMILIES
from tests.training.weights import FAMILIES, SMALL, Weights, changed, checkpoint_of, read_weights

NUM_UPDATES = int(os.environ.get("UPDATE_CASES", "0"))
"""Of each family and rounding, in the long form of these tests."""
OPTIONS: dict[str, Any] = {"max_model_len": 128, "kvcache_block_size": 32, "device": "cpu"}
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
_RNG = random.Random(0)
_SHARED = random_prompt(_RNG, 48)
PROMPTS = [_SHARED + random_prompt(_RNG, 5), _SHARED[:20], random_prompt(_RNG, 3)]
"""With a prefix that stays cached: of the old weights it would be wrong."""


def tokens_of(llm: LLM) -> list[Any]:
    """Return the tokens after each prompt; for the last also their log-probabilities."""
    params = [GREEDY, GREEDY, dataclasses.replace(GREEDY, logprobs=2)]
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    return [token_ids(outputs), outputs[-1].outputs[0].logprobs]


def in_buckets(weights: Weights, seed: int) -> Any:
    """Yield the tensors in any order, some in float32."""
    rng = random.Random(seed)
    for name in rng.sample(sorted(weights), len(weights)):
        yield name, weights[name].float() if rng.random() < 0.3 else weights[name]


ROUNDED = [(family, {"quantization": how}) for how in (None, "int8", "int4") for family in FAMILIES]
FORMS: list[tuple[str, dict[str, Any]]] = [
    ("qwen3", {"dtype": "float32"}),
    ("qwen3", {"dtype": "float32", "quantization": "int4"}),
    ("qwen3", {"native_kernels": False}),  # a layer in oneDNN's layout: of the embedding's size
    ("qwen3", {"native_kernels": False, "quantization": "fp8"}),
    *ROUNDED[:: 1 if EVERY_CASE else 2],
]


@pytest.mark.skipif(library() is None, reason="no compiler here")
@pytest.mark.parametrize(("family", "options"), FORMS, ids=str)
def test_tokens_are_those_of_a_fresh_engine(
    family: str,
    options: dict[str, Any],
    shared_checkpoint: Callable[..., str],
    make_llm: Callable[..., LLM],
    tmp_path: Path,
) -> None:
    """Tensors in any order; prefix hits, recorded steps, states."""
    model = shared_checkpoint(**FAMILIES[family])
    options = {**OPTIONS, **options}
    llm = make_llm(model, **options)
    first = tokens_of(llm)
    weights = read_weights(model)
    for seed in range(NUM_UPDATES or (3 if family == "qwen3" else 1)):
        weights = changed(weights, seed)
        llm.update_weights(in_buckets(weights, seed))
        if family == "gpt2":  # a mask, which is left out as when it is loaded
            llm.update_weights({"transformer.h.0.attn.bias": torch.ones(1, 1, 8, 8)})
        fresh = LLM(checkpoint_of(model, weights, tmp_path / "new"), **options)
        try:
            expected = tokens_of(fresh)
        finally:
            fresh.shutdown()
        assert tokens_of(llm) == expected, seed
        assert expected != first
    assert llm.weight_version == seed + 1 + (family == "gpt2")


@pytest.fixture
def model(shared_checkpoint: Callable[..., str]) -> str:
    return shared_checkpoint(**SMALL)


def test_several_calls_are_one_update(model: str, make_llm: Callable[..., LLM]) -> None:
    """Parts of a rounded layer come in different calls; a request between them is refused."""
    new = changed(read_weights(model), 1)
    llm = make_llm(model, quantization="int8", **OPTIONS)
    other = make_llm(model, quantization="int8", **OPTIONS)
    other.update_weights(new, weight_version="step-7")
    llm.start_weight_update()
    for item in in_buckets(new, 3):
        llm.update_weights([item])
        with pytest.raises(InvalidRequestError, match="finish_weight_update"):
            llm.generate([1], GREEDY, use_tqdm=False)
    with pytest.raises(InvalidRequestError, match="must be an int or a str"):
        llm.finish_weight_update(1.5)  # type: ignore[arg-type]
    llm.finish_weight_update("step-7")
    (output,) = llm.generate([1], GREEDY, use_tqdm=False)
    assert output.weight_version == llm.weight_version == "step-7"
    assert tokens_of(llm) == tokens_of(other)


def test_parts_of_exact_layers_may_come_alone(
    model: str, make_llm: Callable[..., LLM], tmp_path: Path
) -> None:
    """Also the head of a tied model, and names as in a text model that is part of another."""
    old = read_weights(model)
    new = changed(old, 1)
    names = [name for name in new if "q_proj" in name or "up_proj" in name or "norm" in name]
    llm = make_llm(model, **OPTIONS)
    nested = {name.replace("model.", "model.language_model.", 1): new[name] for name in names}
    llm.update_weights(nested | {"lm_head.weight": old["model.embed_tokens.weight"]})
    mixed = checkpoint_of(model, old | {name: new[name] for name in names}, tmp_path)
    assert tokens_of(llm) == tokens_of(make_llm(mixed, **OPTIONS))


Q_PROJ = "model.layers.1.self_attn.q_proj.weight"


def _with(weights: Weights, name: str, value: Any) -> list[tuple[str, Any]]:
    return [*weights.items(), (name, value)]


WRONG: dict[str, tuple[Callable[[Weights], Any], str]] = {
    "unknown": (
        lambda w: _with(w, "model.layers.9.mlp.up_proj.weight", torch.ones(2)),
        "no tensor 'model.layers.9.mlp.up_proj.weight'",
    ),
    "shape": (lambda w: _with(w, Q_PROJ, w[Q_PROJ].T), r"q_proj.weight has shape \[96, 192\]"),
    "dtype": (lambda w: _with(w, Q_PROJ, w[Q_PROJ].to(torch.int32)), "dtype torch.int32"),
    "nan": (lambda w: _with(w, Q_PROJ, w[Q_PROJ] * float("nan")), "NaN or infinite"),
    "no pair": (lambda w: [*w.items(), "model"], "takes pairs"),
    "no tensor": (lambda w: _with(w, Q_PROJ, [1.0]), "must be a dense tensor"),
    "sparse": (lambda w: _with(w, Q_PROJ, w[Q_PROJ].to_sparse()), "must be a dense tensor"),
    "twice": (lambda w: _with(w, Q_PROJ, w[Q_PROJ]), f"{Q_PROJ} comes twice in one update"),
    "meta": (lambda w: _with(w, Q_PROJ, w[Q_PROJ].to("meta")), "must be a dense tensor"),
    "missing": (
        lambda w: [item for item in w.items() if item[0] != Q_PROJ],
        f"{Q_PROJ} missing: the layer model.layers.1.self_attn.qkv_proj is rounded as a whole",
    ),
}


def test_a_wrong_tensor_changes_nothing(model: str, make_llm: Any) -> None:
    llm = make_llm(model, quantization="int4", **OPTIONS)
    before = tokens_of(llm)
    new = changed(read_weights(model), 1)
    for make, message in WRONG.values():
        with pytest.raises(InvalidRequestError, match=message):
            llm.update_weights(make(new))
        assert tokens_of(llm) == before
    assert llm.weight_version == 0


def test_an_iterator_that_fails(model: str, make_llm: Callable[..., LLM]) -> None:
    """Before the first layer was written nothing has changed; behind it all weights must come."""
    new = changed(read_weights(model), 1)
    llm = make_llm(model, **OPTIONS)
    before = tokens_of(llm)

    def failing(first: int, last: int) -> Any:
        yield from list(new.items())[first:last]
        raise RuntimeError("the trainer failed")

    with pytest.raises(RuntimeError, match="the trainer failed"):
        llm.update_weights(failing(0, 0))
    assert tokens_of(llm) == before
    llm.start_weight_update()
    llm.update_weights(list(new.items())[:2])
    with pytest.raises(RuntimeError, match="the trainer failed"):
        llm.update_weights(failing(2, len(new)))
    with pytest.raises(InvalidRequestError, match="weights are not whole: .* more must come"):
        tokens_of(llm)
    llm.update_weights([(name, new[name]) for name in list(new)[:3]])
    with pytest.raises(InvalidRequestError, match="weights are not whole"):
        tokens_of(llm)
    llm.update_weights(iter(new.items()))
    other = make_llm(model, **OPTIONS)
    other.update_weights(new)
    assert tokens_of(llm) == tokens_of(other)


def reused(weights: Weights) -> Any:
    """Yield the tensors in memory that has other numbers as soon as the next is asked for: merged
    adapters are taken apart, and gathered shards are freed, behind the last tensor.
    """
    for name, tensor in weights.items():
        memory = tensor.clone()
        yield name, memory
        memory.zero_()


def test_an_update_inside_another(model: str, make_llm: Callable[..., LLM]) -> None:
    """Each is refused, and ends nothing: the outer one goes on."""
    new = changed(read_weights(model), 1)
    llm, other = make_llm(model, **OPTIONS), make_llm(model, **OPTIONS)
    calls: list[tuple[Callable[[], Any], str]] = [
        (lambda: llm.update_weights(new), "another call of update_weights runs"),
        (lambda: llm.update_weights(iter(new.items())), "an update cannot begin"),
        (llm.start_weight_update, "an update cannot begin"),
        (llm.finish_weight_update, "another call of update_weights runs"),
        (llm.sleep, r"sleep\(\) cannot begin"),
        (lambda: llm.generate([1], GREEDY, use_tqdm=False), "an update of the weights runs"),
    ]

    def calling() -> Any:
        for item in new.items():
            for call, message in calls:
                with pytest.raises(InvalidRequestError, match=message):
                    call()
            yield item

    llm.update_weights(calling())
    other.update_weights(reused(new))
    sent = [each.unpacked() for message in in_messages(reused(new)) for each in message]
    assert [name for name, _ in sent] == list(new)
    assert all(torch.equal(tensor, new[name]) for name, tensor in sent)
    assert tokens_of(llm) == tokens_of(other)
    assert llm.weight_version == 1


def refuse_to_write(runner: Any, rank: int) -> None:
    """Let `rank` fail at a layer, and have no room for its weights; -1: no rank."""
    fails = tensor_parallel().rank == rank

    def write(weight: Weight, *given: Any) -> None:
        if fails and ".layers.1." in weight.name:
            raise UnsupportedModelError("this layer cannot be changed")
        writing.write(weight, *given)

    rank_module.write = write
    os.environ["TMPDIR"] = "/missing" if fails else tempfile.gettempdir()


@pytest.mark.parametrize("num_ranks", [1, 2] if NUM_UPDATES else [1])
def test_a_rank_that_fails(
    num_ranks: int, model: str, make_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No request sees ranks of which some sleep, or have other weights than the rest."""
    monkeypatch.setenv("TMPDIR", tempfile.gettempdir())
    monkeypatch.setattr(rank_module, "write", writing.write)
    old = read_weights(model)
    llm = make_llm(model, tensor_parallel_size=num_ranks, **OPTIONS)
    before = tokens_of(llm)
    executor = llm.engine.executor
    executor.call_all(refuse_to_write, num_ranks - 1)
    with pytest.raises(ConfigError, match="set TMPDIR to a directory with room, or use level=2"):
        llm.sleep()
    assert not llm.is_sleeping()
    assert tokens_of(llm) == before
    with pytest.raises(UnsupportedModelError, match="cannot be changed"):
        llm.update_weights(iter(changed(old, 1).items()))
    with pytest.raises(InvalidRequestError, match="weights are not whole"):
        tokens_of(llm)
    executor.call_all(refuse_to_write, -1)
    llm.update_weights(reused(old))
    assert tokens_of(llm) == before
    llm.sleep()
    llm.wake_up()
    assert tokens_of(llm) == before


def test_files_of_weights(model: str, make_llm: Callable[..., LLM], tmp_path: Path) -> None:
    """Headers are checked as a whole; a number that is wrong is found where it is read."""
    old = read_weights(model)
    new = changed(old, 1)
    directory = checkpoint_of(model, new, tmp_path / "new")
    fewer = {name: tensor for name, tensor in new.items() if name != Q_PROJ}
    llm, other = make_llm(model, **OPTIONS), make_llm(model, **OPTIONS)
    before = tokens_of(llm)
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken/model.safetensors").write_bytes(b"x" * 100)
    (tmp_path / "link").mkdir()
    (tmp_path / "link/model.safetensors").symlink_to(tmp_path / "new/model.safetensors")
    for path, message in [
        (tmp_path / "missing", "has no safetensors files"),
        (tmp_path / "empty", "has no safetensors files"),
        (tmp_path / "broken", "is not a sound safetensors file"),
        (tmp_path / "link", "is outside the directory"),
        ("a\0b", "cannot open file"),
        (checkpoint_of(model, old | {"x": new[Q_PROJ]}, tmp_path / "more"), "no tensor 'x'"),
        (
            checkpoint_of(model, new | {Q_PROJ: new[Q_PROJ].to(torch.int32)}, tmp_path / "ints"),
            "dtype torch.int32",
        ),
        (checkpoint_of(model, fewer, tmp_path / "fewer"), f"lack {Q_PROJ}, which would keep"),
    ]:
        with pytest.raises(InvalidRequestError, match=message):
            llm.update_weights(path)
        assert llm.weight_version == 0
    assert tokens_of(llm) == before
    wrong = new | {Q_PROJ: new[Q_PROJ] * float("nan")}
    with pytest.raises(InvalidRequestError, match="NaN or infinite"):
        llm.update_weights(checkpoint_of(model, wrong, tmp_path / "nan"))
    with pytest.raises(InvalidRequestError, match="weights are not whole"):
        tokens_of(llm)
    llm.update_weights(Path(directory), weight_version="step-7")
    other.update_weights(new)
    assert tokens_of(llm) == tokens_of(other) != before
    assert llm.weight_version == "step-7"
    llm.start_weight_update()
    llm.update_weights(tmp_path / "fewer")  # a part, as its caller says
    llm.finish_weight_update()
    assert tokens_of(llm) == tokens_of(other)


def truncate(file: Path) -> None:
    os.truncate(file, 5000)


def run_all(commands: Iterator[Callable[[], Any]]) -> None:
    for command in commands:
        command()


@pytest.mark.parametrize(
    ("change", "num_read"),
    [(os.remove, 0), (truncate, 1), (os.utime, None)],
    ids=["removed", "cut", "touched"],
)
def test_files_that_change(
    change: Callable[[Path], None],
    num_read: int | None,
    model: str,
    make_llm: Callable[..., LLM],
    tmp_path: Path,
) -> None:
    """Symptom: with mode="wait" offsets of one file are used for a later one; or an OSError; or
    SIGBUS, as a page of a mapped file is behind its end.
    """
    llm = make_llm(model, **OPTIONS)
    new = changed(read_weights(model), 1)
    update = Update(llm._control, checkpoint_of(model, new, tmp_path), None, "abort")
    commands = update.commands()
    for _ in range(3 + (len(new) if num_read is None else num_read)):
        next(commands)()  # open, check, start, and a tensor each
    assert str(tmp_path) not in Path("/proc/self/maps").read_text(encoding="utf-8")
    change(tmp_path / "model.safetensors")
    with pytest.raises(InvalidRequestError, match=r"update_weights: .*model\.safetensors.*new dir"):
        run_all(commands)
    update.fail()
    if num_read == 0:
        assert llm.generate([1], GREEDY, use_tqdm=False)
    else:
        with pytest.raises(InvalidRequestError, match="weights are not whole"):
            tokens_of(llm)


def test_adapters_stay(model: str, make_llm: Callable[..., LLM], tmp_path: Path) -> None:
    """Below adapters of requests lies the layer's own weight: it sleeps and changes alone."""
    paths = [write_adapter(tmp_path / f"a{i}", linears_of(model), seed=i) for i in range(2)]
    adapters = [None, *(LoRARequest(path, i, path) for i, path in enumerate(paths, 1))]

    def outputs(llm: LLM, adapter: LoRARequest | None) -> list[list[int]]:
        return token_ids(llm.generate(PROMPTS, GREEDY, use_tqdm=False, lora_request=adapter))

    options = {**OPTIONS, "quantization": "int4", "enable_lora": True}
    llm, other = make_llm(model, **options), make_llm(model, **options)
    expected = [outputs(llm, adapter) for adapter in adapters]
    for adapter, tokens in zip(adapters, expected, strict=True):
        llm.sleep()  # the second time with another adapter in the slot than in the first
        llm.wake_up()
        assert outputs(llm, adapter) == tokens
    new = changed(read_weights(model), 1)
    llm.update_weights(new)
    fresh = make_llm(checkpoint_of(model, new, tmp_path / "new"), **options)
    assert [outputs(llm, adapter) for adapter in adapters] == [
        outputs(fresh, adapter) for adapter in adapters
    ]
    assert outputs(other, adapters[1]) == expected[1] != expected[0]


@pytest.mark.parametrize(
    ("family", "saved", "published"),
    [
        ("kimi_linear", ".0.block_sparse_moe.", ".0.block_sparse_moe."),
        ("bailing_hybrid", ".attention.dense.", ".attention.o_proj."),
        ("gpt2", "transformer.", ""),
    ],
)
def test_names_of_its_own_checkpoint(
    family: str,
    saved: str,
    published: str,
    shared_checkpoint: Any,
    make_llm: Callable[..., LLM],
    tmp_path: Path,
) -> None:
    """Symptom: only transformers' names are known, under which a published file may not be."""
    sizes = OTHER_FAMILIES["kimi_linear" if family == "bailing_hybrid" else family]
    more = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 7, "tie_word_embeddings": False}
    if family == "bailing_hybrid":
        more |= {"n_group": 1, "topk_group": 1}
    given = shared_checkpoint(**{**MODEL, **sizes, "model_type": family, **more})
    weights = read_weights(given)
    assert any(saved in name for name in weights)
    named = {name.replace(saved, published): weights[name] for name in weights}
    llm = make_llm(checkpoint_of(given, named, tmp_path / "own"), **OPTIONS)
    new = changed(named, 1)
    llm.update_weights(new)
    fresh = make_llm(checkpoint_of(given, new, tmp_path / "new"), **OPTIONS)
    assert tokens_of(llm) == tokens_of(fresh)


def test_experts_of_one_tensor(
    shared_checkpoint: Callable[..., str], make_llm: Callable[..., LLM]
) -> None:
    """transformers 5 has the experts of a layer in one tensor; its checkpoints have each alone."""
    model = shared_checkpoint(**FAMILIES["qwen3_moe"])
    new = changed(read_weights(model), 1)
    together = {name: tensor for name, tensor in new.items() if ".experts." not in name}
    for layer in range(3):
        path = f"model.layers.{layer}.mlp.experts"
        linears = {
            kind: torch.stack([new[f"{path}.{expert}.{kind}_proj.weight"] for expert in range(8)])
            for kind in ("gate", "up", "down")
        }
        together[f"{path}.gate_up_proj"] = torch.cat([linears["gate"], linears["up"]], 1)
        together[f"{path}.down_proj"] = linears["down"]
    llm, other = (make_llm(model, quantization="int8", **OPTIONS) for _ in range(2))
    llm.update_weights(new)
    other.update_weights(together)
    assert tokens_of(llm) == tokens_of(other)


def test_stored_formats_are_refused(random_model: str, tmp_path: Path, make_llm: Any) -> None:
    path, _ = make_fp8_checkpoint(random_model, tmp_path, "blocks")
    llm = make_llm(path, max_model_len=48)
    with pytest.raises(UnsupportedModelError, match="stores its weights as fp8"):
        llm.update_weights([("model.norm.weight", torch.ones(64))])
    with pytest.raises(UnsupportedModelError, match="stores its weights as fp8"):
        llm.sleep(level=2)
    assert not llm.is_sleeping()
    llm.sleep()
    llm.wake_up()
    llm.generate([1], GREEDY, use_tqdm=False)
