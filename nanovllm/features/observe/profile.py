"""`Profile`: between `start` and `stop` it writes files that ui.perfetto.dev shows: the engine's
`Trace`, and of each rank what torch's profiler sees.

All methods are called between two steps, by the thread that runs the engine.
"""

import dataclasses
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


@dataclasses.dataclass
class Profile:
    """Begins and ends the profile of an engine, whose end ends the trace, too."""

    engine: LLMEngine

    def start(self) -> None:
        """Begin a profile, with the requests that run.

        Raises:
            InvalidRequestError: one runs already, or `profile_dir` is None.
            ConfigError: a file cannot be written there.
            EngineDeadError: the engine is down.
        """
        engine = self.engine
        engine.check_health()
        if engine.profile is not None:
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
        engine.profile = begin, trace

    def stop(self) -> list[str]:
        """End the profile and return its files.

        Raises:
            InvalidRequestError: none runs.
            ConfigError: a file cannot be written.
            EngineDeadError: the engine is down.
        """
        self.engine.check_health()
        if self.engine.profile is None:
            raise InvalidRequestError("no profile runs: start_profile() begins one")
        begin, trace = self.engine.profile
        self.engine.profile = None
        self.engine.observers.remove(trace)
        trace.close()
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
