"""The option lora_modules: adapters that a request can name as its model. Reads no file."""

import json
from collections.abc import Collection, Sequence as Seq
from typing import Any

from nanovllm.errors import ConfigError, InvalidRequestError
from nanovllm.options.lora_request import LoRARequest
from nanovllm.options.validation import shown

_KEYS = ("name", "path", "base_model_name")


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
        fields = _fields(text)
        name = fields["name"]
        if name in taken or name in found:
            raise ConfigError(f"lora_modules: {shown(name)} is another model's name: give its own")
        try:
            found[name] = LoRARequest(
                name, len(found) + 1, fields["path"], fields.get("base_model_name")
            )
        except InvalidRequestError as error:
            raise ConfigError(f"lora_modules {shown(text)}: {error}") from None
    return found


def _fields(text: str) -> dict[str, Any]:
    rule = 'name=path or {"name": ..., "path": ...}'
    if not text.lstrip().startswith("{"):
        name, equals, path = text.partition("=")
        if not equals:
            raise ConfigError(f"lora_modules must be {rule}, got {shown(text)}")
        return {"name": name, "path": path}
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError):
        raise ConfigError(f"lora_modules must be {rule}, got {shown(text)}") from None
    if not {"name", "path"} <= fields.keys() <= {*_KEYS} or not isinstance(fields["name"], str):
        raise ConfigError(f"lora_modules has the keys {', '.join(_KEYS)}, got {shown(text)}")
    return dict(fields)
