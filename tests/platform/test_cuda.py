"""What a user learns where the Triton kernels cannot be compiled. The GPU is pretended."""

import contextlib
import shutil
import sys
import sysconfig
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from nanovllm.errors import ConfigError
from nanovllm.kernels.torch_kernels import TORCH
from nanovllm.options.config import Config
from nanovllm.platform import cuda
from nanovllm.platform.cuda import CUDA


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """A GPU whose kernels cannot be imported, though no tool is missing."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setitem(sys.modules, "nanovllm.kernels.triton", None)
    monkeypatch.setattr(cuda.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(cuda.os.path, "isfile", lambda path: True)
    monkeypatch.delenv("CC", raising=False)
    cuda._refusal.cache_clear()
    cuda.triton_available.cache_clear()
    yield monkeypatch
    cuda._refusal.cache_clear()
    cuda.triton_available.cache_clear()


def test_without_the_package(broken: pytest.MonkeyPatch) -> None:
    broken.setattr(cuda.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="the triton package is missing: pip install triton"):
        cuda.require_triton("cuda")


def test_without_a_compiler(broken: pytest.MonkeyPatch) -> None:
    broken.setattr(shutil, "which", lambda name: None)
    with pytest.raises(ConfigError, match="device 'cuda:1': .* no C compiler: install gcc"):
        cuda.require_triton("cuda:1")
    broken.setenv("CC", "icx")
    cuda._refusal.cache_clear()
    with pytest.raises(ConfigError, match="device 'cuda:1': the Triton kernels cannot run"):
        cuda.require_triton("cuda:1")


def test_without_pythons_headers(broken: pytest.MonkeyPatch) -> None:
    broken.setattr(cuda.os.path, "isfile", lambda path: False)
    include = sysconfig.get_path("include", "posix_prefix")
    with pytest.raises(ConfigError, match=f"{include} has no Python.h: install") as raised:
        cuda.require_triton("cuda")
    assert "native_kernels=False" in str(raised.value)
    assert "import of nanovllm.kernels.triton halted" in str(raised.value)


def test_what_cannot_be_installed(
    broken: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An engine on a device that nobody named goes on without the kernels, and says so."""
    with pytest.raises(ConfigError, match="'cuda': the Triton kernels cannot run: .* halted"):
        cuda.require_triton("cuda")
    assert not cuda.triton_available()
    assert "using plain torch, which is slower: " in caplog.text
    assert "import of nanovllm.kernels.triton halted" in caplog.text
    broken.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    broken.setattr(shutil, "which", lambda name: None)
    cuda._refusal.cache_clear()
    with pytest.raises(ConfigError, match=r"\(7, 5\) is below \(8, 0\); choose plain torch"):
        cuda.require_triton("cuda")


@pytest.mark.parametrize(
    ("options", "asked"),
    [
        ({"device": "cuda"}, True),
        ({"device": "cuda:1"}, True),
        ({"device": "auto"}, False),
        ({"device": "cuda", "native_kernels": False}, False),
    ],
)
def test_who_names_a_gpu_gets_the_error(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], asked: bool
) -> None:
    class Reached(Exception):
        pass

    def require(device: str) -> None:
        assert device == options["device"]
        raise ConfigError("install gcc")

    def reached() -> bool:
        raise Reached

    monkeypatch.setattr(cuda, "require_triton", require)
    monkeypatch.setattr(cuda, "triton_available", reached)
    config = Config("model", **options)
    gpu = CUDA(torch.device("cuda", 0), config.device)
    with pytest.raises(ConfigError) if asked else contextlib.suppress(Reached):
        assert gpu.kernels(torch.bfloat16, native=config.native_kernels) is TORCH
