"""What each rank consists of: the networks that the options ask for, its device and threads, and
its model runner.
"""

import contextlib
import dataclasses
import math
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from nanovllm.errors import CheckpointError, ConfigError
from nanovllm.loading.files import is_gguf
from nanovllm.loading.hub import Checkpoint, weight_files
from nanovllm.models.model_config import ModelConfig
from nanovllm.models.registry import read_config
from nanovllm.options.config import PLATFORMS, Config
from nanovllm.options.plugins import at_start, is_plugin, load_class
from nanovllm.platform import Platform
from nanovllm.utils.process import control_groups
from nanovllm.worker.hooks import WorkerHook, step_runner_class
from nanovllm.worker.model_loader import NetworkSpec, check_weights, user_parts
from nanovllm.worker.model_runner import ModelRunner
from nanovllm.worker.network import Network

if TYPE_CHECKING:
    from nanovllm.features.graphs.step_runners import StepRunners
    from nanovllm.features.speculation.proposers.proposer import Proposer


def check_network(config: Config, checkpoint: Checkpoint) -> NetworkSpec:
    """Return what the ranks load of `checkpoint`.

    Raises:
        CheckpointError, ConfigError: it cannot run with `config`.
    """
    model_config = _model_config(config, checkpoint)
    if model_config.quantization_config is not None:
        from nanovllm.features.quantization.weight_formats import check_quantization

        check_quantization(model_config.quantization_config, config)
    if config.tensor_parallel_size > model_config.num_heads:  # else a process is spawned for each
        raise ConfigError(
            f"tensor_parallel_size {config.tensor_parallel_size} does not divide this model's "
            f"num_attention_heads ({model_config.num_heads})"
        )
    files = []
    if config.load_format != "dummy":
        files = weight_files(checkpoint, config.model, config.revision, config.download_dir)
        own = user_parts(model_config)
        model_config = at_start(own, "loading", check_weights, model_config, files)
    return NetworkSpec(config, model_config, files)


def check_networks(
    config: Config, checkpoint: Checkpoint, draft: Checkpoint | None = None
) -> tuple[NetworkSpec, NetworkSpec | None]:
    """Return what the ranks load: the target, and the draft network if there is one.

    Raises:
        CheckpointError, ConfigError: one of them cannot run with `config`, or not with the other,
            or a class of the user's cannot be loaded.
    """
    _check_plugins(config)
    target = check_network(config, checkpoint)
    if checkpoint.config.get("vision_config") or checkpoint.mmproj is not None:
        from nanovllm.features.vision.family import find_family

        target = target._replace(vision=find_family(config, checkpoint))
    if config.speculation is not None and config.speculation.method == "mtp":
        from nanovllm.features.speculation.proposers.mtp_head import check_mtp

        return target, check_mtp(target)
    return target, None if draft is None else _check_draft(target, draft)


def _check_draft(target: NetworkSpec, checkpoint: Checkpoint) -> NetworkSpec:
    """Return the draft network of `target`: in its dtype, and quantised like it."""
    spec = target.config.speculation
    assert spec is not None
    assert spec.model is not None
    config = dataclasses.replace(
        target.config,
        model=spec.model,
        revision=None,
        hf_overrides=None,
        dtype=str(target.model_config.dtype).removeprefix("torch."),
        speculative_config=None,
        model_family=None,
    )
    if spec.method == "eagle3":
        from nanovllm.features.speculation.proposers.eagle3_head import check_eagle3

        files = []
        if config.load_format != "dummy":
            files = weight_files(checkpoint, config.model, None, config.download_dir)
        head_config = check_eagle3(checkpoint.config, target.model_config, files)
        # The option is for the target: a head's weights keep all their bits.
        return NetworkSpec(dataclasses.replace(config, quantization="none"), head_config, files)
    model_config = _model_config(config, checkpoint)
    if model_config.vocab_size != target.model_config.vocab_size:
        raise ConfigError(
            f"speculative_config: the draft model {spec.model} has a vocabulary of "
            f"{model_config.vocab_size} tokens, but {target.config.model} has "
            f"{target.model_config.vocab_size}; both must have the same"
        )
    if model_config.quantization_config is not None:
        config = dataclasses.replace(config, quantization=None)
    return check_network(config, checkpoint)


def _model_config(config: Config, checkpoint: Checkpoint) -> ModelConfig:
    try:
        found = read_config(checkpoint.config, config.dtype, config.model_family)
    except CheckpointError as error:
        if is_gguf(checkpoint.path):  # the message names fields of a config.json
            raise type(error)(f"{checkpoint.path}, its metadata as a {error}") from error
        raise
    if is_plugin(config.quantization):
        from nanovllm.features.quantization.weight_formats import UserFormat

        assert config.quantization is not None
        own = UserFormat(config.quantization, found.quantization_config or {})
        found = dataclasses.replace(found, quantization_config=own)
    is_quantised = found.quantization_config is not None
    in_float16 = config.dtype == "auto" and found.dtype == torch.float16
    # GPTQ and AWQ uploads say float16, which the C kernels do not compute in.
    if is_quantised and in_float16 and not platform_class(config).computes_float16:
        return dataclasses.replace(found, dtype=torch.bfloat16)
    return found


def platform_class(config: Config) -> type[Platform]:
    """Return the class of the device that the option device names: "auto" is the first one of ours
    that is there.

    Raises:
        ConfigError: it is the user's, and cannot be loaded.
    """

    def load(value: str) -> type[Platform]:
        return load_class("device", value, Platform, ("device", "asked"))  # type: ignore[type-abstract]

    if config.device == "auto":
        return next(found for found in map(load, PLATFORMS.values()) if found.is_available())
    return load(PLATFORMS.get(config.device.partition(":")[0], config.device))


def rank_platform(config: Config, rank: int = 0) -> Platform:
    """Return the device of rank `rank`.

    Raises:
        ConfigError: there is no such device, or there are fewer than ranks.
    """
    found = platform_class(config)
    device = found.find(config.device, rank, config.tensor_parallel_size)
    return found(device, config.device)


def make_runner(
    target: NetworkSpec, platform: Platform, draft: NetworkSpec | None = None
) -> ModelRunner:
    """Return the runner of one rank, with the parts that the options ask for."""
    config = target.config
    make_steps: Callable[[Network, int], StepRunners] | None = None
    make_drafter: Callable[[Network, int], Proposer] | None = None
    if not (config.enforce_eager or config.enable_return_routed_experts):
        from nanovllm.features.graphs import step_runners

        make_steps = step_runners.StepRunners
    if config.speculation is not None:
        from nanovllm.features.speculation.proposers import make_proposer

        make_drafter = partial(make_proposer, config.speculation, draft, make_steps)
    files = None
    if config.has_tiers:
        from nanovllm.features.tiers.weight_files import WeightSnapshot

        vision = target.vision
        tower = [] if vision is None or vision.mmproj is None else [vision.mmproj]
        files = WeightSnapshot([*target.files, *tower])  # before they are loaded
    runner = ModelRunner(
        target,
        platform,
        make_steps=make_steps,
        make_drafter=make_drafter,
        make_parts={"pooling": partial(_make_pooling, target.files)},
    )
    if config.enable_lora:
        from nanovllm.features.lora.rank_adapters import RankAdapters

        runner.parts.append(RankAdapters(runner))
    if target.vision is not None:
        from nanovllm.features.vision.rank_vision import RankVision

        runner.parts.append(RankVision(runner, target.vision, target))
    if config.enable_return_routed_experts:
        from nanovllm.features.training.rank_routing import RankRouting

        runner.parts.append(RankRouting(runner))
    if files is not None:
        from nanovllm.features.tiers.rank_tiers import RankTiers

        runner.parts.append(RankTiers(runner, files))
    return runner


def _check_plugins(config: Config) -> None:
    """Raise ConfigError if a class of the user's that ranks need cannot be loaded: otherwise each
    of them would find out by itself. `check_network` looks for families and formats.
    """
    if is_plugin(config.attention_backend):
        from nanovllm.attention.selector import backend_class

        backend_class(config.attention_backend)
    if config.step_runner is not None:
        step_runner_class(config.step_runner)
    if config.logits_rules:
        from nanovllm.layers.logits_rules import load_rules

        load_rules(config.logits_rules)
    if config.kv_store is not None:
        from nanovllm.features.tiers.directory import store_class

        store_class(config.kv_store)
    method = None if config.speculation is None else config.speculation.method
    if method is not None and is_plugin(method):
        from nanovllm.features.speculation.proposers import proposer_class

        proposer_class(method)


def _make_pooling(files: list[Path], network: Network) -> WorkerHook:
    from nanovllm.features.pooling.rank_pooling import RankPooling

    return RankPooling(network, files)


def num_threads(config: Config) -> int:
    """Return the CPU threads of each rank: a share of config.num_threads or of `num_cores`."""
    total = config.num_threads or min(torch.get_num_threads(), num_cores())
    return max(1, total // config.tensor_parallel_size)


def num_cores() -> int:
    """Return the number of cores that affinity and cgroup quota leave to this process."""
    cores = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    return max(1, min([cores, *map(math.ceil, _cpu_limits())]))


def _cpu_limits() -> Iterator[float]:
    """Yield the CPU quotas of this process's cgroups (version 1 or 2), in cores."""
    for group in control_groups("cpu"):
        with contextlib.suppress(OSError, ValueError):
            quota, period = (group / "cpu.max").read_text(encoding="utf-8").split()
            yield int(quota) / int(period)  # the quota "max" means no limit; int() refuses it
        with contextlib.suppress(OSError, ValueError):
            microseconds = int((group / "cpu.cfs_quota_us").read_text(encoding="utf-8"))
            if microseconds > 0:  # -1 means no limit
                yield microseconds / int((group / "cpu.cfs_period_us").read_text(encoding="utf-8"))
