"""A device that no machine has: all of it is in this file. It computes with plain torch and later
than the host asks, so a copy that is read too early has no values.
"""

from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch

from nanovllm import SamplingParams, demo_model
from nanovllm.errors import ConfigError
from nanovllm.options.config import Config
from nanovllm.platform import HostEvent, Platform
from tests.helpers import Request, assert_same_outputs, generate_all, parameter_requests

NAME = "tests.platform.test_made_up_platform:Abacus"
LATE = -(2**40)
"""What is in memory of the host before the device has written it."""


class Later(HostEvent):
    """Behind copies that are made when the host waits for it."""

    def __init__(self, copies: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        super().__init__()
        self._copies = copies

    @torch.inference_mode()
    def synchronize(self) -> None:
        while self._copies:
            target, source = self._copies.pop(0)
            target.copy_(source)


class Abacus(Platform):
    """Its tensors are torch's on the CPU. The engine cannot know."""

    runs_ahead: ClassVar[bool] = True
    made: ClassVar["list[Abacus]"] = []

    def __init__(self, device: torch.device, asked: str = "auto") -> None:
        super().__init__(device, asked)
        self.made.append(self)
        self.num_uploads = 0
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []

    @classmethod
    def find(cls, asked: str, rank: int, num_ranks: int) -> torch.device:
        if rank:
            raise ConfigError("there is one abacus")
        return torch.device("cpu")

    def fingerprint(self) -> dict[str, Any]:
        return {"beads": 91}

    def pool_bytes(self, utilization: float, num_ranks: int, warm_up: Callable[[], int]) -> int:
        return 2**20 - warm_up()

    def upload(self, values: Any) -> torch.Tensor:
        self.num_uploads += 1
        return super().upload(values)

    def to_host(self, x: torch.Tensor) -> torch.Tensor:
        found = torch.full_like(x, LATE if x.dtype == torch.int64 else torch.nan)
        self._copies.append((found, x.clone()))
        return found

    def record(self, *, timed: bool = False) -> Later:
        return Later(self._copies)


@pytest.fixture(autouse=True)
def _none_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Abacus, "made", [])


@pytest.mark.parametrize(
    "options", [{}, {"speculative_config": {"method": "ngram"}, "max_num_batched_tokens": 16}]
)
def test_outputs_are_those_of_a_cpu(
    options: dict[str, Any], random_model: str, make_llm: Any
) -> None:
    common = {"dtype": "float32", "max_model_len": 48, "kvcache_block_size": 4}
    requests: list[Request] = parameter_requests()[:20]
    plain = make_llm(random_model, device="cpu", native_kernels=False, **common)
    llm = make_llm(random_model, device=NAME, **common, **options)
    assert llm.engine.queue_depth == 1
    assert_same_outputs(generate_all(llm, requests), generate_all(plain, requests))
    (abacus,) = Abacus.made
    assert abacus.num_uploads > 10


def test_grammars_and_profiles(make_llm: Any, tmp_path: Any) -> None:
    """They read what the device has computed, too."""
    params = SamplingParams(
        temperature=0, max_tokens=8, structured_outputs={"choice": ["block", "table"]}
    )
    llm = make_llm(demo_model.MODEL, device=NAME, max_model_len=64, profile_dir=str(tmp_path))
    llm.start_profile()
    (output,) = llm.generate("What is a KV cache?", params, use_tqdm=False)
    assert output.text in ("block", "table")
    assert len(llm.stop_profile()) == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tensor_parallel_size": 2}, "there is one abacus"),
        ({"kv_offload_gib": 0.1}, "kv_offload_gib, kv_cache_dir and kv_store need a CPU or a CUDA"),
        ({"kv_cache_dtype": "fp8"}, 'kv_cache_dtype "fp8" needs a GPU'),
    ],
)
def test_what_it_lacks(options: dict[str, Any], message: str, make_llm: Any) -> None:
    with pytest.raises(ConfigError, match=message):
        make_llm(demo_model.MODEL, device=NAME, max_model_len=64, **options)


@pytest.mark.parametrize("device", ["abacus", "cuda:x", "cpu:0", "cuda:", "", 7])
def test_unknown_names(device: Any) -> None:
    with pytest.raises(ConfigError, match='device must be "auto", .*"cpu"'):
        Config("model", device=device)


def test_a_name_that_a_package_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nanovllm.options.plugins.installed", lambda kind: {"abacus": NAME})
    assert Config("model", device="abacus").device == NAME
