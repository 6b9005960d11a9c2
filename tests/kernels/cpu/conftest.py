"""Fixtures of the tests of the C kernels."""

import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nanovllm.kernels.cpu.library import library
from tests.kernels.cpu.helpers import built_library


@pytest.fixture
def cache(tmp_path, monkeypatch, caplog) -> Iterator[Path]:
    """An empty cache of compiled kernels for this test, not yet made. No kernels are loaded yet."""
    built_library()  # out of the usual cache
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    caplog.set_level(logging.INFO)
    library.cache_clear()
    yield tmp_path / "cache" / "nanovllm"
    library.cache_clear()


@pytest.fixture
def warnings(caplog) -> Callable[[], list[str]]:
    """Return a function that lists the warnings in the log."""
    return lambda: [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
