"""How an engine is built: what has begun ends if a later part cannot be made."""

from pathlib import Path
from typing import Any

import pytest

from nanovllm import factory
from nanovllm.features.observe.trace import Trace
from nanovllm.options.config import Config
from nanovllm.parallel.in_process import InProcessExecutor


def test_a_failed_start_ends_its_parts(
    random_model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[str] = []

    def fail(*_: Any) -> None:
        raise OSError("for the test")

    monkeypatch.setattr(InProcessExecutor, "start", fail)
    monkeypatch.setattr(InProcessExecutor, "shutdown", lambda _: ended.append("executor"))
    monkeypatch.setattr(Trace, "close", lambda _: ended.append("trace"))
    with pytest.raises(OSError, match="for the test"):
        factory.make_engine(Config(random_model, trace_file=str(tmp_path / "trace.json")))
    assert ended == ["executor", "trace"]
