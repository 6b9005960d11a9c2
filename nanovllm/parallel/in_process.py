"""Runs the only rank in this process."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from nanovllm.core.messages import Schedule
from nanovllm.core.worker_info import WorkerInfo
from nanovllm.errors import EngineDeadError
from nanovllm.parallel.rank_setup import make_runner, num_threads, rank_platform
from nanovllm.worker.kv_cache import memory_errors, require_one_sequence
from nanovllm.worker.model_loader import NetworkSpec
from nanovllm.worker.model_runner import ModelRunner
from nanovllm.worker.step_output import PendingResult
from nanovllm.worker.warm_up import allocate, measure

if TYPE_CHECKING:
    from nanovllm.features.structured.grammar import GrammarCompiler


class InProcessExecutor:
    """Runs the only rank in this process."""

    def __init__(self, target: NetworkSpec, draft: NetworkSpec | None = None) -> None:
        self._target = target
        self._draft = draft
        self._runner: ModelRunner | None = None
        self._num_threads = num_threads(target.config)
        self._dead = ""

    def start(self) -> WorkerInfo:
        config = self._target.config
        platform = rank_platform(config)
        with platform.current(self._num_threads), memory_errors(config):
            runner = make_runner(self._target, platform, self._draft)
            info = measure(runner)
            require_one_sequence(info)
            info = allocate(runner, info)
        self._runner = runner
        return info

    def set_grammars(self, compiler: "GrammarCompiler") -> None:
        from nanovllm.features.structured.grammar_masks import GrammarMasks

        assert self._runner is not None
        self._runner.masks = GrammarMasks(compiler)

    def execute(self, schedule: Schedule) -> PendingResult:
        self.check_health()
        assert self._runner is not None
        with self._runner.platform.current(self._num_threads):
            return self._runner.execute(schedule)

    def call_all(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        self.check_health()
        assert self._runner is not None
        with self._runner.platform.current(self._num_threads), torch.inference_mode():
            return [function(self._runner, *arguments)]

    def check_health(self) -> None:
        if self._runner is None:
            raise EngineDeadError(self._dead)

    def shutdown(self, reason: str = "the engine was shut down; make a new LLM") -> None:
        self._dead = self._dead or reason
        self._runner = None
