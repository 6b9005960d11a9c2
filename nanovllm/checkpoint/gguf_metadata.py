"""The metadata of a GGUF file, with checked access.

Knows no architecture. Imports no torch.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from nanovllm.checkpoint.gguf_header import GgufHeader
from nanovllm.errors import CheckpointError, UnsupportedModelError
from nanovllm.options.validation import check_float, check_int, shown

MAX_SIZE = 2**24
"""Of each size: far above every known model."""


class Metadata:
    """The metadata of a file; errors name the file and the key.

    The methods but `text` take keys of the architecture, without its name.
    """

    def __init__(self, file: Path, header: GgufHeader) -> None:
        self.file = file
        self.tensors = header.tensors
        self.values = header.metadata
        self._read: set[str] = set()
        self.architecture = self.text("general.architecture")

    def text(self, key: str, default: str | None = None) -> str:
        """Return the string of key `key`."""
        value = self.values.get(key, default)
        if not isinstance(value, str):
            raise CheckpointError(f"{self.file}: {key} must be a string, is {shown(value)}")
        return value

    def own(self, key: str) -> Any:
        """Return a setting as it is; None if it is absent."""
        self._read.add(key)
        return self.values.get(f"{self.architecture}.{key}")

    def unread(self) -> set[str]:
        """Return the keys of the settings that no method was asked for."""
        prefix = f"{self.architecture}."
        keys = {key.removeprefix(prefix) for key in self.values if key.startswith(prefix)}
        return keys - self._read

    def unsupported(self, key: str, value: Any, rule: str = "") -> UnsupportedModelError:
        """Return the error for a setting that is not implemented, and the rule for it."""
        name = f"{self.architecture}.{key}"
        rule = f": it must be {rule}" if rule else ""
        return UnsupportedModelError(
            f"{self.file}: {name:.100} {shown(value)} is not supported{rule}"
        )

    def setting(
        self, key: str, check: Callable[..., Any], *limits: Any, default: Any = None
    ) -> Any:
        """Return a setting, checked by `check`; `default` if it is absent."""
        value = self.own(key)
        if value is None and default is not None:
            return default
        return check(CheckpointError, f"{self.file}: {self.architecture}.{key}", value, *limits)

    def size(self, key: str, default: int | None = None) -> int:
        """Return a size: an integer of at least 1, or of at least 0 if `default` is 0."""
        low = 0 if default == 0 else 1
        found: int = self.setting(key, check_int, low, MAX_SIZE, default=default)
        return found

    def number(self, key: str, default: float | None = None) -> float:
        """Return a number above 0."""
        found: float = self.setting(key, check_float, 1e-30, 1e12, default=default)
        return found

    def listed(self, key: str, length: int, kind: type) -> list[Any] | None:
        """Return `listed_for_layers` if the setting is a list, else None."""
        is_list = isinstance(self.own(key), list)
        return self.listed_for_layers(key, length, kind) if is_list else None

    def listed_for_layers(self, key: str, length: int, kind: type) -> list[Any]:
        """Return a setting that is a list of `length` elements of type `kind`."""
        values = self.own(key)
        fits = isinstance(values, list) and len(values) == length
        if not fits or any(type(value) is not kind for value in values):
            raise CheckpointError(
                f"{self.file}: {self.architecture}.{key} must be a list of {length} "
                f"{kind.__name__}, one for each layer, is {shown(values)}"
            )
        found: list[Any] = values
        return found
