"""What a user learns where the Triton kernels cannot be compiled. The GPU is pretended."""

import shutil
import sys
import sysconfig
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from nanovllm.errors import ConfigError
from nanovllm.kernels import selector
from nanovllm.options.config import Config
from nanovllm.worker import model_runner
from nanovllm.worker.model_runner import ModelRunner


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """A GPU whose kernels cannot be imported, though no tool is missing."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setitem(sys.modules, "nanovllm.kernels.triton", None)
    monkeypatch.setattr(selector.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(selector.os.path, "isfile", lambda path: True)
    monkeypatch.delenv("CC", raising=False)
    selector._refusal.cache_clear()
    selector.triton_available.cache_clear()
    yield monkeypatch
    selector._refusal.cache_clear()
    selector.triton_available.cache_clear()


def test_without_the_package(broken: pytest.MonkeyPatch) -> None:
    broken.setattr(selector.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="the triton package is missing: pip install triton"):
        selector.require_triton("cuda")


def test_without_a_compiler(broken: pytest.MonkeyPatch) -> None:
    broken.setattr(shutil, "which", lambda name: None)
    with pytest.raises(ConfigError, match="device 'cuda:1': .* no C compiler: install gcc"):
        selector.require_triton("cuda:1")
    broken.setenv("CC", "icx")
    selector._refusal.cache_clear()
    with pytest.raises(ConfigError, match="device 'cuda:1': the Triton kernels cannot run"):
        selector.require_triton("cuda:1")


def test_without_pythons_headers(broken: pytest.MonkeyPatch) -> None:
    broken.setattr(selector.os.path, "isfile", lambda path: False)
    include = sysconfig.get_path("include", "posix_prefix")
    with pytest.raises(ConfigError, match=f"{include} has no Python.h: install") as raised:
        selector.require_triton("cuda")
    assert "native_kernels=False" in str(raised.value)
    assert "import of nanovllm.kernels.triton halted" in str(raised.value)


def test_what_cannot_be_installed(
    broken: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An engine on a device that nobody named goes on without the kernels, and says so."""
    with pytest.raises(ConfigError, match="'cuda': the Triton kernels cannot run: .* halted"):
        selector.require_triton("cuda")
    assert not selector.triton_available()
    assert "using plain torch, which is slower: " in caplog.text
    assert "import of nanovllm.kernels.triton halted" in caplog.text
    broken.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    broken.setattr(shutil, "which", lambda name: None)
    selector._refusal.cache_clear()
    with pytest.raises(ConfigError, match=r"\(7, 5\) is below \(8, 0\); choose plain torch"):
        selector.require_triton("cuda")


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

    class Target:
        config = Config("model", **options)

        @property
        def model_config(self) -> None:
            raise Reached

    monkeypatch.setattr(model_runner, "require_triton", require)
    with pytest.raises(ConfigError if asked else Reached):
        ModelRunner(Target(), torch.device("cuda"))  # type: ignore[arg-type]
