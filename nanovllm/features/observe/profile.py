"""`Profile`: between `start` and `stop` it writes files that ui.perfetto.dev shows: the engine's
`Trace`, and of each rank what torch's profiler sees.

All methods are called between two steps, by the thread that runs the engine.
"""

import time
import weakref
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, supported_activities

from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.errors import ConfigError, InvalidRequestError
from nanovllm.features.observe.trace import Trace
from nanovllm.options.validation import shown, writing
from nanovllm.worker.model_runner import ModelRunner

_numbers = count()


class Profile:
    """What an engine's `start_profile` begins."""

    def __init__(self, engine: LLMEngine) -> None:
        self._engine = weakref.ref(engine)
        self._begin = ""  # of the files' names; empty: no profile runs
        self._trace: Trace | None = None  # of the profile that runs; the engine's end ends it too

    @property
    def engine(self) -> LLMEngine:
        engine = self._engine()
        assert engine is not None
        return engine

    def start(self) -> None:
        """Begin a profile, with the requests that run.

        Raises:
            InvalidRequestError: one runs already, or `profile_dir` is None.
            ConfigError: a file cannot be written there.
            EngineDeadError: the engine is down.
        """
        engine = self.engine
        engine.check_health()
        if self._begin:
            raise InvalidRequestError("a profile runs already: stop_profile() ends it")
        if engine.config.profile_dir is None:
            raise InvalidRequestError(
                "profile_dir is None, so a profile has no place: make the engine with profile_dir"
            )
        directory = Path(engine.config.profile_dir)
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"profile_dir {shown(str(directory))} cannot be made: {error.strerror}"
            ) from error
        moment = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
        begin = str(directory / f"{moment}-{next(_numbers)}")
        trace = Trace(f"{begin}-engine.json")
        for request in engine.output_processor.requests.values():
            trace.add_request(request)
        engine.executor.call_all(_start)
        engine.observers.append(trace)
        self._begin = begin
        self._trace = trace

    def stop(self) -> list[str]:
        """End the profile and return its files.

        Raises:
            InvalidRequestError: none runs.
            ConfigError: a file cannot be written.
            EngineDeadError: the engine is down.
        """
        self.engine.check_health()
        if not self._begin:
            raise InvalidRequestError("no profile runs: start_profile() begins one")
        begin, self._begin = self._begin, ""
        assert self._trace is not None
        self.engine.observers.remove(self._trace)
        self._trace.close()
        self._trace = None
        return [f"{begin}-engine.json", *self.engine.executor.call_all(_stop, begin)]


_of_runners: "weakref.WeakKeyDictionary[ModelRunner, Any]" = weakref.WeakKeyDictionary()
"""The profilers that run on the ranks of this process."""


def _start(runner: ModelRunner) -> None:
    activities = {ProfilerActivity.CPU}
    if not runner.platform.in_host_memory:
        activities |= supported_activities()  # type: ignore[no-untyped-call]
    # Steps may run in another thread than this one.
    every_thread = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    found = profile(activities=activities, experimental_config=every_thread)
    found.start()
    _of_runners[runner] = found


def _stop(runner: ModelRunner, begin: str) -> str:
    """End the rank's profiler and return its file."""
    found = _of_runners.pop(runner)
    found.stop()
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    path = f"{begin}-rank{rank}.json"
    with writing("profile", path):
        found.export_chrome_trace(path)
    return path


def profile_of(engine: LLMEngine) -> Profile:
    """Return the one profile of `engine`, which is made when it is first asked for."""
    if engine.profile is None:
        engine.profile = Profile(engine)
    return engine.profile
