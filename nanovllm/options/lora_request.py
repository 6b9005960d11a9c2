"""`LoRARequest`: which LoRA adapter a request uses; and the option lora_modules, which names some
that a request can have as its model. Reads no file.
"""

import contextlib
import json
from collections.abc import Collection, Sequence as Seq
from typing import Annotated, Any

from nanovllm.errors import ConfigError, InvalidRequestError
from nanovllm.options.validation import (
    Error,
    check_int,
    check_path,
    checked_dataclass,
    plain_text,
    shown,
)

MAX_NAME_LENGTH = 256
"""Characters of an adapter's name."""
_MAX_PATH_LENGTH = 4096


def _name(error: Error, field: str, name: Any) -> str:
    if (
        not isinstance(name, str)
        or not 0 < len(name) <= MAX_NAME_LENGTH
        or not name.isprintable()
        or name != name.strip()
    ):
        raise error(
            f"{field} must be 1 to {MAX_NAME_LENGTH} printable characters without spaces at its "
            f"ends, got {shown(name)}"
        )
    return plain_text(name)


def _directory(error: Error, field: str, value: Any) -> str:
    path = check_path(error, field, value, "the path of a directory")
    if "\0" in path or len(path) > _MAX_PATH_LENGTH:
        raise error(f"{field} must be the path of a directory, got {shown(path)}")
    return path


@checked_dataclass(InvalidRequestError)
class LoRARequest:
    """A LoRA adapter of a request; fields and their order are vLLM's.

    One id is one adapter for the life of the engine, with one name and one path, as long as
    `load_inplace` does not say otherwise.

    Raises:
        InvalidRequestError: a field is unknown, of the wrong type or out of range.
    """

    lora_name: Annotated[str, _name]
    """Name of the adapter, for people, outputs and logs."""
    lora_int_id: Annotated[int, check_int, 1, 2**63 - 1]
    """Id of the adapter, at least 1."""
    lora_path: Annotated[str, _directory]
    """Directory with adapter_config.json and adapter_model.safetensors, as PEFT saves them."""
    base_model_name: Annotated[str | None, _name] = None
    """Name of the model that the adapter was made for. It is shown, and changes nothing."""
    load_inplace: bool = False
    """Read the files again, which may have changed, or lie at another path: the adapter of this id
    is replaced. Requests that are queued already keep the old one."""

    @property
    def adapter_id(self) -> int:
        return self.lora_int_id

    @property
    def name(self) -> str:
        return self.lora_name

    @property
    def path(self) -> str:
        return self.lora_path


def named_adapters(modules: Seq[str], taken: Collection[str]) -> dict[str, LoRARequest]:
    """Return the adapters of lora_modules, by name; their ids are 1, 2, ...

    Args:
        modules: each is name=path, or vLLM's {"name": ..., "path": ..., "base_model_name": ...}.
        taken: names of the model itself.

    Raises:
        ConfigError: one has another form, or its name is another's.
    """
    found: dict[str, LoRARequest] = {}
    for text in modules:
        name, path, base = _parsed(text)
        try:
            adapter = LoRARequest(name, len(found) + 1, path, base)
        except InvalidRequestError as error:
            raise ConfigError(f"lora_modules {shown(text)}: {error}") from None
        if name in taken or name in found:
            raise ConfigError(f"lora_modules: {shown(name)} is another model's name: give its own")
        found[name] = adapter
    return found


def _parsed(text: str) -> tuple[Any, Any, Any]:
    """Return the name, the path and the name of the base model."""
    if text.lstrip().startswith("{"):
        with contextlib.suppress(ValueError, RecursionError):
            fields = json.loads(text)
            if {"name", "path"} <= fields.keys() <= {"name", "path", "base_model_name"}:
                return fields["name"], fields["path"], fields.get("base_model_name")
    elif "=" in text:
        name, path = text.split("=", 1)
        return name, path, None
    rule = 'name=path or {"name": ..., "path": ..., "base_model_name": ...}'
    raise ConfigError(f"lora_modules must be {rule}, got {shown(text)}")
