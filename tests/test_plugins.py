"""Plugins: classes of the user's at each seam, by name or entry point, here and in other ranks."""

import json
import logging
import shutil
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from nanovllm import SamplingParams, demo_model
from nanovllm.apps.lab.templates.backend import MyBackend
from nanovllm.apps.lab.templates.family import MyFamily
from nanovllm.apps.lab.templates.format import STEPS, MyFormat
from nanovllm.apps.lab.templates.proposer import MyProposer
from nanovllm.apps.lab.templates.rule import MyRule
from nanovllm.apps.lab.templates.runner import MyRunner
from nanovllm.apps.lab.templates.tier import MyTier
from nanovllm.attention.cpu import CPUBackend
from nanovllm.core.messages import Row
from nanovllm.errors import (
    ConfigError,
    InvalidRequestError,
    OutOfMemoryError,
    PluginError,
    UnsupportedModelError,
)
from nanovllm.features.speculation.proposers.proposer import Proposer
from nanovllm.kernels.cpu.library import library
from nanovllm.kernels.torch_kernels import PlainWeight
from nanovllm.models.registry import read_config
from nanovllm.options.config import Config
from nanovllm.options.plugins import GROUP, guarded
from nanovllm.worker.hooks import StepTensors
from nanovllm.worker.model_report import report
from tests.helpers import assert_idle

HERE = "tests.test_plugins"
LAB = "nanovllm.apps.lab.templates"
OPTIONS: dict[str, Any] = {"device": "cpu", "max_model_len": 128, "num_kvcache_blocks": 32}
PROMPTS = ["What is a KV cache?", "A KV cache is"]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def tokens_of(llm: Any, params: SamplingParams = GREEDY) -> list[list[int]]:
    return [output.token_ids for output in llm.generate(PROMPTS, params, use_tqdm=False)]


def made(base: type, called: str = "Made", /, **attributes: Any) -> Any:
    """Return a class that is `base` but for these attributes."""
    return type(called, (base,), attributes)


def fails(*_: Any, **__: Any) -> Any:
    raise KeyError(7)


def without_shards(stored: Any) -> Any:
    stored.shards = lambda weight: [][7]
    return stored


def without_products(stored: Any) -> Any:
    stored.method = lambda dtype, kernels: made(PlainWeight, apply=fails)(stored._values)
    return stored


def changed_format(change: Any) -> Any:
    return made(MyFormat, quantized=lambda *given: change(MyFormat.quantized(*given)))


Broken = made(MyBackend, plan=fails)
NoName = made(MyBackend, name=None)
LikeOurs = made(CPUBackend)  # has the name of ours, too
Contiguous = made(MyBackend, blocks_lie_apart=False)
Raises = made(MyProposer, propose=fails)
NoRun = made(MyRunner, run=fails)
NoLayers = made(MyFamily, "NoLayers", make_layer=fails)
NoForward = made(MyFamily, "NoForward", forward=fails)
FailsInAStep = made(MyFamily, "FailsInAStep", compute_logits=fails)
NoShards = changed_format(without_shards)
NoProducts = changed_format(without_products)
BadConfig = made(MyFormat, __init__=lambda self, config: fails())
FailsToStore = made(MyFormat, quantized=fails)
StoresNothing = changed_format(lambda stored: None)
StoresText = changed_format(lambda stored: "text")
Nameless = made(MyRule, name="two words")
FailsLater = made(MyRule, name="fails", apply=fails)
NoFiles = made(MyTier, has=fails)


class Picky(MyBackend):
    @classmethod
    def unsupported(cls, spec: Any) -> str | None:
        return f"has no heads of {spec.head_dim}"


class KnowsPositions(MyRunner):
    def fits(self, rows: list[Row]) -> bool:
        assert not any(row.num_unverified_tokens for row in rows)
        return super().fits(rows)


class RefusedMemory(MyRunner):
    def run(self, rows: list[Any]) -> StepTensors:
        if self.num_steps.total() == 2:
            self.num_steps.update([0])
            torch.empty(2**60)
        return super().run(rows)


@pytest.mark.parametrize("num_ranks", [1, pytest.param(2, marks=pytest.mark.long)])
def test_ranks_have_them_all(
    num_ranks: int, make_llm: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    """A backend, a proposer, a family, a runner, a tier and a rule together change no token."""
    monkeypatch.chdir(tmp_path)
    options = {**OPTIONS, "tensor_parallel_size": num_ranks, "dtype": "float32"}
    options["kvcache_block_size"] = 16
    options["logits_rules"] = [f"{LAB}.rule:MyRule"]
    plain = make_llm(demo_model.MODEL, **options)
    llm = make_llm(
        demo_model.MODEL,
        **options,
        attention_backend=f"{LAB}.backend:MyBackend",
        speculative_config={"method": f"{LAB}.proposer:MyProposer"},
        model_family=f"{LAB}.family:MyFamily",
        step_runner=f"{LAB}.runner:MyRunner",
        kv_store=f"{LAB}.tier:MyTier",
    )
    assert tokens_of(llm) == tokens_of(plain)
    ruled = GREEDY.clone(extra_args={"my_rule": 500})
    assert tokens_of(llm, ruled) == tokens_of(plain, ruled) != tokens_of(plain)
    assert all(len(set(tokens)) == len(tokens) for tokens in tokens_of(llm, ruled))
    assert_idle(llm)


def test_steps_go_through_them(make_llm: Any) -> None:
    llm = make_llm(
        demo_model.MODEL,
        **OPTIONS,
        step_runner=f"{LAB}.runner:MyRunner",
        attention_backend=f"{LAB}.backend:MyBackend",
        quantization=f"{LAB}.format:MyFormat",
    )
    tokens_of(llm)
    runner = llm.engine.executor._runner
    assert runner.step_runners[0].num_steps[2] >= 10
    assert isinstance(runner.network.backend, MyBackend)
    weight = runner.network.model.model.layers[0].mlp.down_proj.method.weight
    assert torch.equal((weight.float() * STEPS).round() / STEPS, weight.float())


@pytest.mark.skipif(library() is None, reason="no C kernels here")
def test_a_backend_of_the_users_is_not_said_to_be_invariant(make_llm: Any) -> None:
    options = {**OPTIONS, "attention_backend": f"{HERE}:LikeOurs"}
    arithmetic = make_llm(demo_model.MODEL, **options).engine.worker_info.arithmetic
    assert not arithmetic.batch_invariant


def test_a_tier_outlives_the_engine(make_llm: Any, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    prompt = "A KV cache holds keys and values. " * 6
    options = {**OPTIONS, "kvcache_block_size": 16, "kv_store": f"{LAB}.tier:MyTier"}
    llm = make_llm(demo_model.MODEL, **options)
    first = llm.generate(prompt, GREEDY, use_tqdm=False)[0]
    llm.shutdown()
    again = make_llm(demo_model.MODEL, **options).generate(prompt, GREEDY, use_tqdm=False)[0]
    assert first.num_cached_tokens == 0
    assert again.num_cached_tokens > 0
    assert again.token_ids == first.token_ids


def test_a_broken_tier_is_logged_once(
    make_llm: Any, tmp_path: Path, monkeypatch: Any, caplog: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    options = {**OPTIONS, "kvcache_block_size": 16, "kv_store": f"{HERE}:NoFiles"}
    with caplog.at_level(logging.WARNING, "nanovllm"):
        llm = make_llm(demo_model.MODEL, **options)
        llm.generate("A KV cache holds keys and values. " * 6, GREEDY, use_tqdm=False)
    found = [record.getMessage() for record in caplog.records if "kv_store" in record.getMessage()]
    assert found == [
        f'kv_store="{HERE}:NoFiles": has() raised KeyError: 7; what it should give is computed'
    ]


@pytest.mark.parametrize(
    ("option", "value", "error", "message"),
    [
        ("attention_backend", "Broken", PluginError, "plan() raised KeyError: 7"),
        ("attention_backend", "NoName", ConfigError, "has no name: set one in the class"),
        ("attention_backend", "Contiguous", ConfigError, "says that blocks_lie_apart is False"),
        ("attention_backend", "Picky", ConfigError, "cannot serve this model: has no heads of 32"),
        ("attention_backend", "MyRule", ConfigError, "derived from nanovllm.attention.backend.B"),
        ("speculative_config", "MyRule", ConfigError, "derived from nanovllm.features.specula"),
        ("step_runner", "NoRun", PluginError, "run() raised KeyError: 7"),
        ("model_family", "NoLayers", ConfigError, "__init__() raised KeyError: 7"),
        ("model_family", "NoForward", ConfigError, "forward() raised KeyError: 7"),
        ("model_family", "FailsInAStep", PluginError, "a step raised KeyError: 7"),
        ("model_family", "MyRule", ConfigError, "derived from nanovllm.models.decoder.Decoder"),
        ("quantization", "BadConfig", ConfigError, "__init__() raised KeyError: 7"),
        ("quantization", "FailsToStore", ConfigError, "quantized() raised KeyError: 7"),
        ("quantization", "NoShards", ConfigError, "loading raised IndexError: list index"),
        ("quantization", "NoProducts", ConfigError, "forward() raised KeyError: 7"),
        ("quantization", "StoresNothing", ConfigError, "stored() returned None for all"),
        ("quantization", "StoresText", ConfigError, "'str' object has no attribute"),
        ("quantization", "MyRule", ConfigError, "derived from nanovllm.layers.linear.WeightForm"),
        ("logits_rules", "Nameless", ConfigError, "must have a name, which requests give"),
        ("logits_rules", "MyTier", ConfigError, "derived from nanovllm.layers.logits_rules.Log"),
        ("kv_store", "MyRule", ConfigError, "derived from nanovllm.features.tiers.tier.ByteStor"),
    ],
)
def test_a_broken_one_is_named(
    option: str, value: str, error: type[Exception], message: str, make_llm: Any
) -> None:
    name: Any = f"{HERE}:{value}"
    options = {option: {"method": name} if option == "speculative_config" else name}
    if value == "Contiguous":
        options["kv_offload_gib"] = 0.01
    with pytest.raises(error) as raised:
        tokens_of(make_llm(demo_model.MODEL, **OPTIONS, **options))
    assert name in str(raised.value)
    assert message in str(raised.value)


def test_refused_memory_ends_a_step_and_no_engine(make_llm: Any) -> None:
    llm = make_llm(demo_model.MODEL, **OPTIONS, step_runner=f"{HERE}:RefusedMemory")
    with pytest.raises(OutOfMemoryError, match="the system refuses memory that a step needs"):
        tokens_of(llm)
    assert tokens_of(llm)
    assert_idle(llm)


@pytest.mark.parametrize("method", ["propose", "draft"])
def test_a_broken_proposer_is_named(method: str) -> None:
    """Which steps have drafts depends on what they cost: so it is called here. `draft` is ours, and
    calls `propose`.
    """
    proposer = guarded(Raises(None), Proposer, "method")  # type: ignore[arg-type, type-abstract]
    with pytest.raises(PluginError, match=r"^method: propose\(\) raised KeyError: 7"):
        getattr(proposer, method)([Row(0, 0, 1, 4, True, 3)])


def test_a_guard_keeps_no_plugin_in_memory() -> None:
    proposer = guarded(MyProposer(None), Proposer, "method")  # type: ignore[arg-type, type-abstract]
    found = weakref.ref(proposer)
    del proposer
    assert found() is None


def test_a_runner_is_not_asked_about_positions_that_the_device_knows(make_llm: Any) -> None:
    llm = make_llm(demo_model.MODEL, **OPTIONS, step_runner=f"{HERE}:KnowsPositions")
    tokens_of(llm)
    runner = llm.engine.executor._runner
    before = runner.step_runners[0].num_steps.copy()
    with torch.inference_mode():
        runner.run_rows([Row(0, 0, 0, 1, True, num_unverified_tokens=1)])
    assert runner.step_runners[0].num_steps == before


@pytest.mark.parametrize(
    "option",
    [
        *("attention_backend", "step_runner", "kv_store", "logits_rules", "quantization"),
        *("model_family", "speculative_config"),
    ],
)
def test_a_module_that_is_not_there_ends_before_ranks_start(option: str, make_llm: Any) -> None:
    value = "no_such:Class"
    options: Any = {option: {"method": value} if option == "speculative_config" else value}
    with pytest.raises(ConfigError, match="no_such cannot be imported.*PYTHONPATH must have"):
        make_llm(demo_model.MODEL, **OPTIONS, tensor_parallel_size=2, **options)


def test_rules_are_checked_before_a_request_runs(make_llm: Any) -> None:
    llm = make_llm(demo_model.MODEL, **OPTIONS, logits_rules=[f"{LAB}.rule:MyRule"])
    cases: list[tuple[Any, str]] = [
        ({"my_rul": 8}, "extra_args names 'my_rul', which is no logits rule of this engine; did"),
        ({"os:system": 8}, "extra_args names 'os:system', which is no logits rule"),
        ({"my_rule": 0}, "extra_args: my_rule 0: give a number of tokens from 1 to 1000"),
        ({"my_rule": "x"}, "extra_args: my_rule 'x': give a number of tokens"),
    ]
    for args, message in cases:
        with pytest.raises(InvalidRequestError) as raised:
            llm.generate("A", SamplingParams(extra_args=args), use_tqdm=False)
        assert message in str(raised.value)
    with pytest.raises(InvalidRequestError, match="extra_args must be a dictionary with names"):
        GREEDY.clone(extra_args=[1])
    plain = make_llm(demo_model.MODEL, **OPTIONS)
    with pytest.raises(InvalidRequestError, match="'my_rule', which is no logits .*made without"):
        plain.generate("A", GREEDY.clone(extra_args={"my_rule": 8}), use_tqdm=False)


def test_a_rule_that_raises_ends_its_request_alone(make_llm: Any) -> None:
    llm = make_llm(demo_model.MODEL, **OPTIONS, logits_rules=[f"{HERE}:FailsLater"])
    params = [GREEDY.clone(extra_args={"fails": 1}), GREEDY]
    failed, right = llm.generate(PROMPTS, params, use_tqdm=False)
    assert failed.outputs[0].finish_reason == "error"
    assert failed.outputs[0].stop_reason == "logits rule fails failed: KeyError: 7"
    assert len(right.token_ids) == GREEDY.max_tokens
    assert_idle(llm)


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installed package with a plugin of each kind, in a folder where Python finds it."""
    install(
        tmp_path,
        "lab-pack",
        {
            "backend.slow": f"{LAB}.backend:MyBackend",
            "eviction.hits": f"{LAB}.eviction:MyEviction",
            "family.NarwhalForCausalLM": f"{LAB}.family:MyFamily",
            "format.grid": f"{LAB}.format:MyFormat",
            "policy.short": f"{LAB}.policy:MyPolicy",
            "proposer.loop": f"{LAB}.proposer:MyProposer",
            "rule.fresh": f"{LAB}.rule:MyRule",
            "runner.counts": f"{LAB}.runner:MyRunner",
            "tier.files": f"{LAB}.tier:MyTier",
        },
    )
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def install(folder: Path, name: str, plugins: dict[str, str]) -> None:
    """Write what an installer writes of a package: its metadata and entry points."""
    info = folder / f"{name.replace('-', '_')}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    lines = [f"{key} = {value}\n" for key, value in plugins.items()]
    (info / "entry_points.txt").write_text("".join([f"[{GROUP}]\n", *lines]))


def test_entry_points(package: Path) -> None:
    names: dict[str, Any] = {
        "attention_backend": ("slow", "backend:MyBackend"),
        "eviction_policy": ("hits", "eviction:MyEviction"),
        "kv_store": ("files", "tier:MyTier"),
        "logits_rules": ("fresh", "rule:MyRule"),
        "quantization": ("grid", "format:MyFormat"),
        "scheduling_policy": ("short", "policy:MyPolicy"),
        "speculative_config": ({"method": "loop"}, "proposer:MyProposer"),
        "step_runner": ("counts", "runner:MyRunner"),
    }
    config = Config("model", **{option: given for option, (given, _) in names.items()})
    for option, (_, meant) in names.items():
        found = getattr(config, option)
        found = found.method if option == "speculative_config" else found
        assert found == ((f"{LAB}.{meant}",) if option == "logits_rules" else f"{LAB}.{meant}")
    with pytest.raises(ConfigError, match='"priority", "fcfs", "short" or a class of yours'):
        Config("model", scheduling_policy="hits")  # of another kind
    install(package, "other-pack", {"policy.short": "other:Policy"})
    with pytest.raises(ConfigError, match="two installed packages have an entry point policy.sho"):
        Config("model", scheduling_policy="short")


def test_a_checkpoint_names_installed_families_and_formats(
    package: Path, make_llm: Any, tmp_path: Path
) -> None:
    expected = tokens_of(make_llm(demo_model.MODEL, **OPTIONS))
    model = tmp_path / "narwhal"
    shutil.copytree(demo_model.MODEL, model)
    fields = json.loads((model / "config.json").read_text())
    fields["architectures"] = ["NarwhalForCausalLM"]
    (model / "config.json").write_text(json.dumps(fields))
    assert tokens_of(make_llm(model, **OPTIONS)) == expected
    found = report(str(model))
    assert (found["supported"], found["family"]) == (True, f"{LAB}.family")
    fields["quantization_config"] = {"quant_method": "grid", "steps": 2**16}
    (model / "config.json").write_text(json.dumps(fields))
    llm = make_llm(model, **OPTIONS)
    method = llm.engine.executor._runner.network.model.model.layers[0].mlp.down_proj.method
    assert torch.equal((method.weight.float() * 2**16).round() / 2**16, method.weight.float())


@pytest.mark.parametrize("name", ["os:system", f"{LAB}.family:MyFamily", "MyFamily"])
def test_a_checkpoint_cannot_name_a_module(name: str, make_llm: Any, tmp_path: Path) -> None:
    fields = json.loads((Path(demo_model.MODEL) / "config.json").read_text())
    with pytest.raises(UnsupportedModelError, match="is not supported"):
        read_config({**fields, "architectures": [name]})
    model = tmp_path / "model"
    shutil.copytree(demo_model.MODEL, model)
    fields["quantization_config"] = {"quant_method": name}
    (model / "config.json").write_text(json.dumps(fields))
    with pytest.raises(UnsupportedModelError, match="quant_method .* is not supported"):
        make_llm(model, **OPTIONS)


@pytest.mark.long
@pytest.mark.spawned
def test_spawned_ranks_find_the_module(make_llm: Any, tmp_path: Path, monkeypatch: Any) -> None:
    """A module that only this process's sys.path has."""
    source = Path(MyRule.__module__.replace(".", "/")).name
    text = (Path(__file__).parent.parent / f"nanovllm/apps/lab/templates/{source}.py").read_text()
    (tmp_path / "far_rule.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    llm = make_llm(
        demo_model.MODEL, **OPTIONS, tensor_parallel_size=2, logits_rules=["far_rule:MyRule"]
    )
    ruled = tokens_of(llm, GREEDY.clone(extra_args={"my_rule": 500}))
    assert all(len(set(tokens)) == len(tokens) for tokens in ruled)
