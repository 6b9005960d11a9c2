"""`LoRARequest`: which LoRA adapter a request uses. Reads no file."""

import dataclasses
import os

from nanovllm.errors import InvalidRequestError
from nanovllm.options.validation import check_bool, check_int, shown, strict_keywords

MAX_NAME_LENGTH = 256
"""Characters of an adapter's name."""
_MAX_PATH_LENGTH = 4096


@strict_keywords(InvalidRequestError)
@dataclasses.dataclass(frozen=True)
class LoRARequest:
    """A LoRA adapter of a request; fields and their order are vLLM's.

    One id is one adapter for the life of the engine, with one name and one path, as long as
    `load_inplace` does not say otherwise.

    Raises:
        InvalidRequestError: a field is unknown, of the wrong type or out of range.
    """

    lora_name: str
    """Name of the adapter, for people, outputs and logs."""
    lora_int_id: int
    """Id of the adapter, at least 1."""
    lora_path: str
    """Directory with adapter_config.json and adapter_model.safetensors, as PEFT saves them."""
    base_model_name: str | None = None
    """Name of the model that the adapter was made for. It is shown, and changes nothing."""
    load_inplace: bool = False
    """Read the files again, which may have changed, or lie at another path: the adapter of this id
    is replaced. Requests that are queued already keep the old one."""

    def __post_init__(self) -> None:
        error = InvalidRequestError
        _check_name("lora_name", self.lora_name)
        if self.base_model_name is not None:
            _check_name("base_model_name", self.base_model_name)
        number = check_int(error, "lora_int_id", self.lora_int_id, 1, 2**63 - 1)
        check_bool(error, "load_inplace", self.load_inplace)
        path = self.lora_path
        if not isinstance(path, str | os.PathLike) or not isinstance(os.fspath(path), str):
            raise error(f"lora_path must be a directory, got {shown(path)}")
        path = os.fspath(path)
        if not path or "\0" in path or len(path) > _MAX_PATH_LENGTH:
            raise error(f"lora_path must be the path of a directory, got {shown(path)}")
        object.__setattr__(self, "lora_int_id", number)
        object.__setattr__(self, "lora_path", path)

    @property
    def adapter_id(self) -> int:
        return self.lora_int_id

    @property
    def name(self) -> str:
        return self.lora_name

    @property
    def path(self) -> str:
        return self.lora_path


def _check_name(field: str, name: str) -> None:
    if (
        not isinstance(name, str)
        or not 0 < len(name) <= MAX_NAME_LENGTH
        or not name.isprintable()
        or name != name.strip()
    ):
        raise InvalidRequestError(
            f"{field} must be 1 to {MAX_NAME_LENGTH} printable characters without spaces at its "
            f"ends, got {shown(name)}"
        )
