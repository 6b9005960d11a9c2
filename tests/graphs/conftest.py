"""Fixtures of the tests of graphs."""

from collections.abc import Callable

import pytest

from tests.graphs.fake_graphs import FakeCapture, use_fake_graphs


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> list[FakeCapture]:
    return use_fake_graphs(monkeypatch)


@pytest.fixture(scope="session")
def gpu_model(shared_checkpoint: Callable[..., str]) -> str:
    """A random checkpoint whose head size the Triton kernels support."""
    return shared_checkpoint(
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        head_dim=16,
        max_position_embeddings=64,
        eos_token_id=7,
    )
