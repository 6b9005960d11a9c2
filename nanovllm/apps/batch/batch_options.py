"""What a batch is, apart from its files: the model, its options, and how its rows are answered.

Picklable: workers on other machines get it. Two jobs with the same identity write the same bytes.
"""

import dataclasses
import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from nanovllm import __version__
from nanovllm.apps.server.server_options import AnswerOptions
from nanovllm.errors import ConfigError
from nanovllm.loading.files import check_file, local_path
from nanovllm.options.config import Config
from nanovllm.options.lora_request import named_adapters
from nanovllm.options.validation import (
    check_installed,
    check_int,
    check_names,
    check_text,
    checked_dataclass,
)


@checked_dataclass(ConfigError)
class BatchOptions(AnswerOptions):
    """How `nanovllm batch` answers rows, and who computes them.

    Raises:
        ConfigError: a field is unknown, of the wrong type, or out of range.
    """

    workers: Annotated[int, check_int, 1, 2**16] = 1
    """Number of engines. More than one are actors of Ray; so is one with an address or options."""
    ray_address: Annotated[str | None, check_text] = None
    """Address of a Ray cluster. None is that of RAY_ADDRESS, or the one that `ray start` began on
    this machine; without any, or with "local", one of this machine alone is started."""
    worker_options: Annotated[dict[str, Any] | None, check_names] = None
    """Options of a worker's Ray actor, such as {"num_cpus": 8}. None is as many GPUs as ranks, or
    one CPU where there are none."""

    @property
    def uses_ray(self) -> bool:
        """Whether actors compute the rows."""
        given = (self.ray_address, self.worker_options)
        return self.workers > 1 or any(value is not None for value in given)


@dataclasses.dataclass(frozen=True)
class RowOptions:
    """How rows are answered: what a worker must know.

    Raises:
        NanoVLLMError: an option is invalid, or a package is missing.
    """

    model: str
    engine_options: Mapping[str, Any]
    """Fields of Config."""
    batch: BatchOptions = dataclasses.field(default_factory=BatchOptions)

    def __post_init__(self) -> None:
        check_installed("server", "fastapi", what="a batch, which runs the server's routes,")
        if self.batch.uses_ray:
            check_installed("ray", "ray", what="each of workers, ray_address and worker_options")
        config = Config(model=self.model, **self.engine_options)
        if named_adapters(self.batch.lora_modules, ()) and not config.enable_lora:
            raise ConfigError(
                "lora_modules are for adapters that rows name, but enable_lora is False: give "
                "enable_lora=True too, or leave lora_modules out"
            )
        from nanovllm.apps.server.output_parsers.answer_format import find_answer_format

        find_answer_format(None, *self.batch.parsers)  # checks their names


_ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
_END_BYTES = 2**20
"""Bytes that are read at each end of a large file, besides its size."""


def job_identity(options: RowOptions, input_digest: str) -> dict[str, Any]:
    """Return what decides the outputs of a job, for its manifest.

    Raises:
        CheckpointError: an adapter's file is outside its directory, or not a regular file.
    """
    batch = options.batch
    named = named_adapters(batch.lora_modules, ())
    adapters = {name: adapter.lora_path for name, adapter in named.items()}
    return {
        "nanovllm": __version__,
        "input": input_digest,
        "model": options.model,
        "model's files": model_digest(options.model),
        "adapters' files": {name: adapter_digest(path) for name, path in adapters.items()},
        "engine options": dict(sorted(options.engine_options.items())),
        "served model name": batch.served_model_name,
        "chat template": batch.chat_template,
        "parsers": list(batch.parsers),
    }


def model_digest(model: str) -> str:
    """Return a digest of a local checkpoint: names, sizes, and the ends of its files.

    A hub id names its files itself: its digest is that of the name.
    """
    path = Path(model)
    digest = hashlib.sha256()
    if not path.exists():
        return hashlib.sha256(model.encode()).hexdigest()
    files = [path] if path.is_file() else sorted(item for item in path.iterdir() if item.is_file())
    for file in files:
        digest.update(f"{file.name}\0{file.stat().st_size}\0".encode())
        with file.open("rb") as opened:
            digest.update(opened.read(_END_BYTES))
            if file.stat().st_size > 2 * _END_BYTES:
                opened.seek(-_END_BYTES, os.SEEK_END)
            digest.update(opened.read(_END_BYTES))
    return digest.hexdigest()


def adapter_digest(path: str) -> str:
    """Return a digest of the whole files of an adapter; without files it is that of the path.

    Raises:
        CheckpointError: a file is outside the directory, or not a regular file.
    """
    directory = local_path(path, "adapter")
    digest = hashlib.sha256()
    for name in _ADAPTER_FILES:
        if check_file(directory, name):
            with (directory / name).open("rb") as opened:
                digest.update(hashlib.file_digest(opened, "sha256").digest())
        else:
            digest.update(f"{name}\0{path}".encode())
    return digest.hexdigest()
