"""The metadata of a GGUF file, with checked access.

Knows no architecture. Imports no torch.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from nanovllm.checkpoint.gguf_header import GgufHeader
from nanovllm.errors import CheckpointError
from nanovllm.options.validation import check_float, check_int, shown

MAX_SIZE = 2**24
"""Of each size: far above every known model."""


class Metadata:
    """The metadata of a file; errors name the file and the key."""

    def __init__(self, file: Path, header: GgufHeader) -> None:
        self.file, self.tensors, self.values = file, header.tensors, header.metadata
        self.architecture = self.text("general.architecture")

    def text(self, key: str, default: str | None = None) -> str:
        """Return the string of key `key`."""
        value = self.values.get(key, default)
        if not isinstance(value, str):
            raise CheckpointError(f"{self.file}: {key} must be a string, is {shown(value)}")
        return value

    def setting(
        self, key: str, check: Callable[..., Any], *limits: Any, default: Any = None
    ) -> Any:
        """Return key `key` of the architecture, checked by `check`; `default` if it is absent."""
        key = f"{self.architecture}.{key}"
        value = self.values.get(key)
        if value is None and default is not None:
            return default
        return check(CheckpointError, f"{self.file}: {key}", value, *limits)

    def size(self, key: str, default: int | None = None) -> int:
        """Return a size of the architecture, an integer of at least 1."""
        found: int = self.setting(key, check_int, 1, MAX_SIZE, default=default)
        return found

    def number(self, key: str, default: float | None = None) -> float:
        """Return a number of the architecture, above 0."""
        found: float = self.setting(key, check_float, 1e-30, 1e12, default=default)
        return found

    def has(self, key: str) -> bool:
        """Return whether the architecture has key `key`."""
        return f"{self.architecture}.{key}" in self.values

    def listed(self, key: str, length: int, kind: type) -> list[Any] | None:
        """Return key `key` of the architecture if it is a list, which must have `length` elements
        of type `kind`; None if it is none.
        """
        values = self.values.get(f"{self.architecture}.{key}")
        if not isinstance(values, list):
            return None
        if len(values) != length or any(type(value) is not kind for value in values):
            raise CheckpointError(
                f"{self.file}: {self.architecture}.{key} must be a list of {length} "
                f"{kind.__name__}, one for each layer, is {shown(values)}"
            )
        return values

    def settings(self) -> set[str]:
        """Return the names of the architecture's settings."""
        prefix = f"{self.architecture}."
        return {key.removeprefix(prefix) for key in self.values if key.startswith(prefix)}
