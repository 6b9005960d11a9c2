"""What a batch is, apart from its files: the model, its options, and how a row becomes a request.

Picklable: workers on other machines get it. Two jobs with the same identity write the same bytes.
"""

import dataclasses
import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from nanovllm import __version__
from nanovllm.apps.batch.rows import OPENAI, OUTPUT_COLUMNS, ROWS
from nanovllm.apps.server.server_options import template_text
from nanovllm.errors import ConfigError
from nanovllm.loading.files import check_file, local_path
from nanovllm.options.config import Config
from nanovllm.options.lora_request import named_adapters
from nanovllm.options.sampling_params import SamplingParams
from nanovllm.options.validation import (
    check_fields,
    check_int,
    check_names,
    check_text,
    check_texts,
    shown,
    strict_keywords,
)

_NO_COLUMNS = {
    "logits_processors": "a batch has no functions in it",
    "logprobs": "OpenAI's batch format has log-probabilities",
    "prompt_logprobs": "OpenAI's batch format has log-probabilities",
    "prompt_logprob_start": "OpenAI's batch format has log-probabilities",
    "output_kind": "a batch has whole outputs",
}
"""Sampling parameters that a batch does not take."""

_FORMS = {
    "prompt_column": ROWS,
    "id_column": ROWS,
    "served_model_name": OPENAI,
    "tool_call_parser": OPENAI,
    "reasoning_parser": OPENAI,
}
"""Options of one form of rows."""


@strict_keywords(ConfigError)
@dataclasses.dataclass(frozen=True)
class BatchOptions:
    """How `nanovllm batch` reads rows, and who computes them.

    Raises:
        ConfigError: a field is unknown, of the wrong type, out of range, or contradicts another.
    """

    prompt_column: Annotated[str, check_text] = "prompt"
    """Column with the prompt: a text or token ids. A row without it has messages in the column
    "messages"."""
    id_column: Annotated[str, check_text] = "id"
    """Column with the id of a row, from which its seed is made. A row without it has its number."""
    chat_template: Annotated[str | None, template_text] = None
    """File with a Jinja template for messages, or the template itself. None is the checkpoint's."""
    tool_call_parser: Annotated[str, check_text] = "auto"
    """Format of tool calls in answers of OpenAI's batch format; "auto" recognises it by the chat
    template."""
    reasoning_parser: Annotated[str, check_text] = "auto"
    """Format of reasoning in answers of OpenAI's batch format, likewise."""
    served_model_name: Annotated[str | None, check_text] = None
    """Name of the model in the bodies of OpenAI's batch format. None is the last part of its path,
    or its hub id."""
    lora_modules: Annotated[tuple[str, ...], check_texts] = ()
    """LoRA adapters that rows can name as their model, each name=path, or JSON such as {"name":
    "sql", "path": "/adapters/sql"}. They need enable_lora."""
    workers: Annotated[int, check_int, 1, 2**16] = 1
    """Number of engines. More than one are actors of Ray; so is one with an address or options."""
    ray_address: Annotated[str | None, check_text] = None
    """Address of a Ray cluster. None is that of RAY_ADDRESS, or the one that `ray start` began on
    this machine; without any, or with "local", one of this machine alone is started."""
    worker_options: Annotated[dict[str, Any] | None, check_names] = None
    """Options of a worker's Ray actor, such as {"num_cpus": 8}. None is as many GPUs as ranks, or
    one CPU where there are none."""

    def __post_init__(self) -> None:
        check_fields(ConfigError, self)
        if self.id_column in OUTPUT_COLUMNS:
            raise ConfigError(f"id_column={shown(self.id_column)} is a column of the output")
        if self.prompt_column == self.id_column:
            raise ConfigError(f"prompt_column and id_column are both {shown(self.id_column)}")

    @property
    def parsers(self) -> tuple[str, str]:
        """The formats of tool calls and of reasoning."""
        return self.tool_call_parser, self.reasoning_parser

    @property
    def uses_ray(self) -> bool:
        """Whether actors compute the rows."""
        given = (self.ray_address, self.worker_options)
        return self.workers > 1 or any(value is not None for value in given)


@dataclasses.dataclass(frozen=True)
class RowOptions:
    """How rows become requests and outputs: what a worker must know.

    Raises:
        NanoVLLMError: an option is invalid.
    """

    model: str
    engine_options: Mapping[str, Any]
    """Fields of Config."""
    sampling: Mapping[str, Any]
    """Fields of SamplingParams that are not the checkpoint's recommendations."""
    form: str = ROWS
    batch: BatchOptions = BatchOptions()
    """How rows are read."""

    def __post_init__(self) -> None:
        config = Config(model=self.model, **self.engine_options)
        if named_adapters(self.batch.lora_modules, ()) and not config.enable_lora:
            raise ConfigError(
                "lora_modules are for adapters that rows name, but enable_lora is False: give "
                "enable_lora=True too, or leave lora_modules out"
            )
        for name, value in self.sampling.items():
            if name in _NO_COLUMNS and value not in (None, ()):
                raise ConfigError(f"{name}={shown(value)} is not for a batch: {_NO_COLUMNS[name]}")
        SamplingParams(**self.sampling)
        if self.form == OPENAI and self.sampling.keys() - {"seed"}:
            name = min(self.sampling.keys() - {"seed"})
            raise ConfigError(
                f"{name}={shown(self.sampling[name])} does not count for OpenAI's batch format: "
                "write it in each row's body"
            )
        self._check_names()
        if self.form == OPENAI:
            from nanovllm.apps.server.output_parsers.answer_format import find_answer_format

            find_answer_format(None, *self.batch.parsers)  # checks their names

    def _check_names(self) -> None:
        """Raise ConfigError for an option of the other form of rows."""
        for field in dataclasses.fields(self.batch):
            value = getattr(self.batch, field.name)
            form = _FORMS.get(field.name, self.form)
            if form != self.form and value != field.default:
                what = "OpenAI's batch format" if form == OPENAI else "rows with a prompt"
                raise ConfigError(
                    f"{field.name}={shown(value)} is for {what}, which this input is not: "
                    "leave it out"
                )

    @property
    def seed(self) -> int:
        """The seed from which, with its id, a row's seed is made."""
        given = self.sampling.get("seed")
        return Config(model=self.model, **self.engine_options).seed if given is None else given

    def identity(self) -> dict[str, Any]:
        """Return what decides the output of a row, as JSON."""
        return {
            "engine options": dict(sorted(self.engine_options.items())),
            "sampling": dict(sorted(self.sampling.items())),
            "format": self.form,
            "prompt column": self.batch.prompt_column,
            "id column": self.batch.id_column,
            "served model name": self.batch.served_model_name,
            "chat template": self.batch.chat_template,
            "parsers": list(self.batch.parsers),
        }


def check_override(given: Mapping[str, Any]) -> None:
    """Raise ConfigError if a row sets a sampling parameter that a row cannot set."""
    for name in given:
        if name == "n":
            raise ConfigError("n is the same for all rows: set it for the batch")
        if name in _NO_COLUMNS:
            raise ConfigError(f"{name} is not for a batch: {_NO_COLUMNS[name]}")


_ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
_END_BYTES = 2**20
"""Bytes that are read at each end of a large file, besides its size."""


def job_identity(options: RowOptions, **more: Any) -> dict[str, Any]:
    """Return what decides the outputs of a job, for its manifest.

    Args:
        more: what it is apart from its options, such as the digest of its input.

    Raises:
        CheckpointError: an adapter's file is outside its directory, or not a regular file.
    """
    named = named_adapters(options.batch.lora_modules, ())
    adapters = {name: adapter.lora_path for name, adapter in named.items()}
    return {
        "nanovllm": __version__,
        **more,
        "model": options.model,
        "model's files": model_digest(options.model),
        "adapters' files": {name: adapter_digest(path) for name, path in adapters.items()},
        **options.identity(),
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
