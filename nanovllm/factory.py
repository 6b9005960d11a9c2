"""Builds an engine from its parts, and from the features that the options ask for.

The engine knows each feature by one interface. Here it is imported, when an option asks for it.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from nanovllm.core.worker_info import EncoderInfo, TierInfo, WorkerInfo
from nanovllm.engine.input_processor import InputProcessor
from nanovllm.engine.llm_engine import LLMEngine, Observer
from nanovllm.engine.output_processor import OutputProcessor
from nanovllm.kv.block_manager import BlockManager
from nanovllm.kv.eviction import EvictionOrder, LeastRecentlyUsed
from nanovllm.kv.groups.group import BidirectionalGroup, KVCacheGroup
from nanovllm.loading.hub import (
    Checkpoint,
    configured_checkpoint,
    draft_checkpoint,
    has_labels,
)
from nanovllm.loading.text_tokenizer import TextTokenizer
from nanovllm.loading.tokenizer import check_same_vocabulary, load_tokenizer, serving_tokenizer
from nanovllm.options.config import EVICTION_POLICIES, SCHEDULING_POLICIES, Config
from nanovllm.options.plugins import load_class, make_guarded
from nanovllm.parallel.executor import Executor, make_executor
from nanovllm.scheduler.fair_policy import FairPolicy
from nanovllm.scheduler.policy import Policy
from nanovllm.scheduler.scheduler import Scheduler

if TYPE_CHECKING:
    from nanovllm.engine.input_checks import PromptLimit
    from nanovllm.features.pooling.requests import PoolingRequests
    from nanovllm.features.speculation.drafting import AdaptiveDrafting
    from nanovllm.features.structured.grammar import GrammarCompiler
    from nanovllm.features.vision.picture_prompts import VisionRequests
    from nanovllm.scheduler.admission_hook import AdmissionHook


def make_engine(config: Config, *, queue_depth: int | None = None) -> LLMEngine:
    """Return an engine that is ready to run.

    Args:
        queue_depth: how many more steps to launch before the oldest step's tokens are known; 0
            waits for each step. None means 1 on CUDA, where a step runs in parallel with the host,
            and 0 on a CPU.

    Raises:
        CheckpointError, ConfigError, OutOfMemoryError: the model cannot run with these options.
    """
    if config.kv_cache_dir is not None:
        from nanovllm.features.tiers.directory import find_directory

        find_directory(config.kv_cache_dir)  # refuse a wrong one before anything is loaded
    plugins = _policy(config), _eviction_order(config)
    checkpoint = configured_checkpoint(config)
    draft = draft_checkpoint(config)
    if draft is not None and config.speculation is not None:
        spec = config.speculation.for_network(draft.config)
        config = dataclasses.replace(config, speculative_config=spec)
    with contextlib.ExitStack() as undo:
        observers = _observers(config)
        for observer in observers:
            undo.callback(observer.close)
        executor = make_executor(config, checkpoint, draft)
        undo.callback(executor.shutdown)
        tokenizer = serving_tokenizer(checkpoint)
        if tokenizer is not None and draft is not None:
            check_same_vocabulary(tokenizer, draft)
        info = executor.start()
        eos_token_ids = checkpoint.eos_token_ids
        ends_turns = None if tokenizer is None else tokenizer.eos_token_id
        if ends_turns is not None and ends_turns < info.vocab_size:
            eos_token_ids |= {ends_turns}  # config.json may name only the end-of-document token
        engine = LLMEngine(
            config,
            info,
            executor,
            make_scheduler(config, info, eos_token_ids, plugins),
            _input_processor(config, info, checkpoint, tokenizer, eos_token_ids, executor),
            OutputProcessor(tokenizer),
            generation_config=_generation_config(config, checkpoint),
            load_tokenizer=cache(partial(load_tokenizer, checkpoint)),
            observers=observers,
            queue_depth=int(info.runs_ahead) if queue_depth is None else queue_depth,
        )
        undo.pop_all()
    return engine


def _generation_config(config: Config, checkpoint: "Checkpoint") -> dict[str, Any]:
    """Return the sampling that is recommended; "vllm" leaves out what the checkpoint says of it."""
    own = config.override_generation_config or {}
    found = {} if config.generation_config == "vllm" else dict(checkpoint.generation_config)
    if "temperature" in own:
        found.pop("do_sample", None)  # False would make it 0
    return {**found, **own}


def _observers(config: Config) -> list[Observer]:
    """Return the observers that the options ask for."""
    if config.trace_file is None:
        return []
    from nanovllm.features.observe.trace import Trace

    return [Trace(config.trace_file)]


def _policy(config: Config) -> Policy:
    """Return the policy that the options ask for."""
    if config.scheduling_policy in SCHEDULING_POLICIES:
        return FairPolicy()
    made: Policy = _users("scheduling_policy", config.scheduling_policy, Policy)()
    return made


def _eviction_order(config: Config) -> Callable[[int], EvictionOrder]:
    """Return what makes the order of eviction that the options ask for, for a number of pages."""
    if config.eviction_policy in EVICTION_POLICIES:
        return LeastRecentlyUsed
    return _users("eviction_policy", config.eviction_policy, EvictionOrder, "num_pages")


def _users(name: str, value: str, base: type, *arguments: str) -> Callable[..., Any]:
    """Return what makes an object of the user's class that an option names."""
    found: type = load_class(name, value, base, arguments)
    return partial(make_guarded, f'{name}="{value}"', base, found)


def make_scheduler(
    config: Config,
    info: WorkerInfo,
    eos_token_ids: frozenset[int] = frozenset(),
    plugins: tuple[Policy, Callable[[int], EvictionOrder]] | None = None,
) -> Scheduler:
    """Return the scheduler of an engine whose workers have found `info`.

    Args:
        plugins: its policy, and what makes its order of eviction; None: those of the options.
    """
    policy, order = plugins or (_policy(config), _eviction_order(config))
    block_manager = BlockManager(
        info.num_blocks,
        info.block_size,
        enable_prefix_caching=config.enable_prefix_caching
        and not config.enable_return_routed_experts
        and info.kv.causal,
        groups=_groups(info),
        order=order(info.num_blocks),
    )
    hooks: list[AdmissionHook] = []
    if config.enable_lora:
        from nanovllm.features.lora.scheduling import AdapterHook

        hooks.append(AdapterHook(config.max_loras))
    if info.tiers is not None:
        hooks.append(_load_hook(config, info.tiers))
    if info.encoder is not None:
        from nanovllm.features.vision.scheduling import EncoderHook

        # The last: it sees what the others let a sequence begin with.
        max_bytes = config.encoder_cache_mib * 2**20
        hooks.append(EncoderHook(info.encoder, max_bytes, info.max_num_batched_tokens))
    return Scheduler(
        block_manager,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=info.max_num_batched_tokens,
        max_model_len=info.max_model_len,
        eos_token_ids=eos_token_ids,
        drafting=make_drafting(config, info, block_manager),
        policy=policy,
        hooks=hooks,
    )


def _groups(info: WorkerInfo) -> list[KVCacheGroup]:
    """Return the groups of layers that keep something else than a page for each block."""
    groups: list[KVCacheGroup] = []
    if info.kv.windows:
        from nanovllm.kv.groups.window import WindowGroup

        budget = info.max_num_batched_tokens
        groups += [WindowGroup(w, number, budget) for number, w in enumerate(info.kv.windows)]
    if info.kv.state_pages:
        from nanovllm.kv.groups.state import StateGroup

        groups.append(StateGroup(info.kv.state_pages))
    if not info.kv.causal:
        groups.append(BidirectionalGroup(info.max_model_len))
    elif info.kv.picture_tokens:
        groups.append(BidirectionalGroup(info.kv.picture_tokens, of_prompts=False))
    return groups


def _load_hook(config: Config, info: TierInfo) -> "AdmissionHook":
    """Return what keeps KV below the pool, and brings it back."""
    from nanovllm.features.tiers.cache import TierCache
    from nanovllm.features.tiers.directory import make_store
    from nanovllm.features.tiers.loads import LoadHook
    from nanovllm.features.tiers.tier import HostSlots, StoreTier
    from nanovllm.features.tiers.traffic import TierTraffic

    host = HostSlots(info.num_host_slots, info.page_seconds) if info.num_host_slots else None
    store = make_store(config, info.kv_namespace)
    tier = None if store is None else StoreTier(store.has)
    return LoadHook(TierCache(TierTraffic(host, tier, token_seconds=info.token_seconds)))


def make_drafting(
    config: Config, info: WorkerInfo, block_manager: BlockManager
) -> "AdaptiveDrafting | None":
    """Return what adds drafts to steps; None without speculation."""
    if config.speculation is None:
        return None
    from nanovllm.features.speculation.draft_controller import DraftController
    from nanovllm.features.speculation.drafting import AdaptiveDrafting

    controller = DraftController(
        config.speculation.max_draft_tokens, info.drafts.step_seconds, info.drafts.draft_seconds
    )
    return AdaptiveDrafting(
        controller,
        block_manager,
        info.max_num_batched_tokens,
        follows_drafts=info.drafts.follows_drafts,
    )


def _make_vision(
    config: Config, info: EncoderInfo, checkpoint: Checkpoint, tokenizer: TextTokenizer | None
) -> "VisionRequests":
    from nanovllm.features.vision.family import find_family
    from nanovllm.features.vision.picture_prompts import VisionRequests

    family = find_family(config, checkpoint)
    assert family is not None
    max_tokens = config.encoder_cache_mib * 2**20 // info.bytes_per_token
    return VisionRequests(family, config, tokenizer, max_tokens)


def _input_processor(
    config: Config,
    info: WorkerInfo,
    checkpoint: Checkpoint,
    tokenizer: TextTokenizer | None,
    eos_token_ids: frozenset[int],
    executor: Executor,
) -> InputProcessor:
    def make_grammars() -> "GrammarCompiler":
        from nanovllm.features.structured.grammar import grammar_compiler

        assert tokenizer is not None
        executor.check_health()
        grammars = grammar_compiler(tokenizer, eos_token_ids, info.vocab_size)
        executor.set_grammars(grammars)
        return grammars

    def make_pooling(limit: "PromptLimit") -> "PoolingRequests":
        from nanovllm.features.pooling.requests import pooling_requests

        def render(messages: list[dict[str, Any]], options: Mapping[str, Any]) -> str:
            return processor.templates.as_they_are(messages, options)

        return pooling_requests(config, checkpoint, tokenizer, limit, render, info.kv.causal)

    more: dict[str, Any] = {}
    if info.encoder is not None:
        more["make_vision"] = partial(_make_vision, config, info.encoder, checkpoint, tokenizer)
    if config.enable_lora:
        from nanovllm.features.lora.adapter_registry import make_registry

        more["find_adapter"] = make_registry(config, checkpoint).find
    if config.logits_rules:
        from nanovllm.layers.logits_rules import load_rules

        more["rules"] = {name: rule.check for name, rule in load_rules(config.logits_rules).items()}
    processor = InputProcessor(
        tokenizer,
        vocab_size=info.vocab_size,
        max_model_len=info.max_model_len,
        generates=info.kv.causal and not has_labels(checkpoint.config),
        seed=config.seed,
        max_logprobs=config.max_logprobs,
        in_process=config.runs_in_process,
        make_grammars=make_grammars,
        make_pooling=make_pooling,
        **more,
    )
    if not processor.limit.generates:
        _ = processor.pooling  # refuse wrong files before any request
    return processor
