"""The header of a GGUF file: its metadata, with checked access, and where each tensor is.

Nothing in the file is trusted: each count, length and offset is checked against the file's size
before it is used. No tensor is read. Imports no torch.
"""

import math
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from nanovllm.errors import CheckpointError, UnsupportedModelError
from nanovllm.loading.files import refuse_pointer
from nanovllm.options.validation import check_float, check_int, shown

MAX_HEADER_BYTES = 32 * 2**20
"""Limit of metadata and tensor table. A vocabulary of 150,000 tokens takes 6 MB."""
_MAX_FIELDS = 4096
_MAX_TENSORS = 2**16
_MAX_ARRAY_ELEMENTS = 2**21
"""Limit of all arrays together."""
_MAX_NAME_BYTES = 1024
"""Of a key, a tensor's name, and a string in an array."""
_MAX_STRING_BYTES = 2**20
_MAX_DIMENSION = 2**32
_VERSIONS = (2, 3)
_STRING = 8
_ARRAY = 9
_SCALARS = {
    type_id: struct.Struct(f"<{letter}")
    for type_id, letter in zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True)
}
"""How a value of each type of the metadata is stored, by the type's number in the file."""
_LENGTH = struct.Struct("<Q")


class GgufType(NamedTuple):
    """How the elements of a tensor are stored: in blocks of neighbours in a row."""

    name: str
    block_size: int
    """Elements of a block."""
    block_bytes: int

    def row_bytes(self, size: int) -> int:
        """Return the bytes of a row of `size` elements, a multiple of `block_size`."""
        return size // self.block_size * self.block_bytes


GGUF_TYPES = {
    type_id: GgufType(*block)
    for type_id, block in {
        0: ("F32", 1, 4),
        1: ("F16", 1, 2),
        2: ("Q4_0", 32, 18),
        3: ("Q4_1", 32, 20),
        6: ("Q5_0", 32, 22),
        7: ("Q5_1", 32, 24),
        8: ("Q8_0", 32, 34),
        10: ("Q2_K", 256, 84),
        11: ("Q3_K", 256, 110),
        12: ("Q4_K", 256, 144),
        13: ("Q5_K", 256, 176),
        14: ("Q6_K", 256, 210),
        20: ("IQ4_NL", 32, 18),
        30: ("BF16", 1, 2),
        39: ("MXFP4", 32, 17),
    }.items()
}
"""The types that are read, by their number in the file (ggml's `ggml_type`)."""


class GgufTensor(NamedTuple):
    """Where a tensor is in the file."""

    type: GgufType
    shape: tuple[int, ...]
    """Outputs first, as in torch; the file has the inputs first."""
    offset: int
    """Of its first byte in the file."""

    @property
    def num_bytes(self) -> int:
        return self.type.row_bytes(math.prod(self.shape))


class GgufHeader(NamedTuple):
    metadata: dict[str, Any]
    """By key: int, float, bool, str, or a list of these."""
    tensors: dict[str, GgufTensor]


def read_gguf_header(file: Path) -> GgufHeader:
    """Return the header of GGUF `file`, which must be a regular file.

    Raises:
        CheckpointError: the file cannot be read, or breaks a rule of the format or a limit of this
            module. The message names the file, the field and the rule.
        UnsupportedModelError: the file is of another version, or has a type that is not read.
    """
    try:
        with file.open("rb") as opened:
            refuse_pointer(file, opened.read(64))
            size = opened.seek(0, 2)
            if size < 24:
                raise CheckpointError(f"{file}: a GGUF file has at least 24 bytes, this one {size}")
            opened.seek(0)
            return _Parser(file, opened.read(MAX_HEADER_BYTES), size).parse()
    except OSError as error:
        raise CheckpointError(f"cannot read {file}: {error}") from error


class _Parser:
    """Reads the fields of a header one after the other; `data` is the beginning of the file."""

    def __init__(self, file: Path, data: bytes, size: int) -> None:
        self._file = file
        self._data = data
        self._size = size
        self._position = 4
        self._field = "version"  # what is being read, for errors
        self._num_elements = 0

    def parse(self) -> GgufHeader:
        if self._data[:4] != b"GGUF":
            self._fail(f"the file must begin with GGUF, begins with {self._data[:4]!r}", "magic")
        version = self._scalar(4)
        if version not in _VERSIONS:
            big = version and not version & 0xFFFF
            self._refuse(
                "is big-endian" if big else f"has GGUF version {version}; 2 and 3 are read"
            )
        self._field = "tensor count"
        num_tensors = self._count(_MAX_TENSORS)
        self._field = "metadata count"
        num_fields = self._count(_MAX_FIELDS)
        metadata: dict[str, Any] = {}
        for index in range(num_fields):
            self._field = f"key {index}"
            key = self._string(_MAX_NAME_BYTES)
            self._field = key
            if key in metadata:
                self._fail("the key appears twice")
            metadata[key] = self._value(self._scalar(4))
        alignment = metadata.get("general.alignment", 32)
        self._field = "general.alignment"
        if type(alignment) is not int or not 8 <= alignment <= 2**16 or alignment.bit_count() > 1:
            self._fail(f"must be a power of two from 8 to 65536, is {shown(alignment)}")
        return GgufHeader(metadata, self._tensors(num_tensors, alignment))

    def _tensors(self, count: int, alignment: int) -> dict[str, GgufTensor]:
        """Read the tensor table. The data of its tensors follow each other, each one aligned."""
        tensors: dict[str, GgufTensor] = {}
        expected = 0  # offset of the next tensor from the first one
        for index in range(count):
            self._field = f"name of tensor {index}"
            name = self._string(_MAX_NAME_BYTES)
            self._field = f"tensor {name}"
            if name in tensors:
                self._fail("the name appears twice")
            num_dimensions = self._scalar(4)
            if not 1 <= num_dimensions <= 4:
                self._fail(f"must have 1 to 4 dimensions, has {num_dimensions}")
            shape = tuple(self._count(_MAX_DIMENSION, 1) for _ in range(num_dimensions))[::-1]
            type_id = self._scalar(4)
            offset = self._scalar(10)
            if type_id not in GGUF_TYPES:
                names = ", ".join(found.name for found in GGUF_TYPES.values())
                self._refuse(f"has type {_type_name(type_id)}, which is not supported ({names})")
            tensor = GgufTensor(GGUF_TYPES[type_id], shape, offset)
            if shape[-1] % tensor.type.block_size:
                rule = f"of a {tensor.type.name} must be a multiple of {tensor.type.block_size}"
                self._fail(f"the row length {rule}, is {shape[-1]}")
            if offset != expected:
                self._fail(f"its offset must be {expected}, is {offset}")
            tensors[name] = tensor
            expected += -(-tensor.num_bytes // alignment) * alignment
            self._check_fits(expected - alignment)  # early: so that no offset becomes astronomic
        start = -(-self._position // alignment) * alignment
        for name, tensor in tensors.items():
            self._field = f"tensor {name}"
            self._check_fits(start + tensor.offset + tensor.num_bytes)
            tensors[name] = tensor._replace(offset=start + tensor.offset)
        return tensors

    def _check_fits(self, end: int) -> None:
        if end > self._size:
            self._fail(f"ends at byte {end} of a file of {self._size}: download the file again")

    def _value(self, type_id: int) -> Any:
        if type_id == _STRING:
            return self._string(_MAX_STRING_BYTES)
        if type_id != _ARRAY:
            return self._scalar(type_id)
        element = self._scalar(4)
        count = self._count(_MAX_ARRAY_ELEMENTS)
        self._num_elements += count
        if self._num_elements > _MAX_ARRAY_ELEMENTS:
            self._fail(f"all arrays together have more than {_MAX_ARRAY_ELEMENTS} elements")
        if element == _STRING:
            return self._strings(count)
        if element not in _SCALARS:
            self._fail(f"an array of type {element} is not read (only strings and numbers)")
        scalar = _SCALARS[element]
        values = self._take(count * scalar.size)
        return [value for (value,) in scalar.iter_unpack(values)]

    def _strings(self, count: int) -> list[str]:
        """Read many strings: `_string` without its calls."""
        data = self._data
        position = self._position
        size = len(self._data)
        found = []
        for _ in range(count):
            if position + 8 > size:
                self._fail_at_end()
            (length,) = _LENGTH.unpack_from(data, position)
            position += 8 + length
            if length > _MAX_NAME_BYTES:
                self._fail(f"a string has {length} bytes; at most {_MAX_NAME_BYTES} are read")
            if position > size:
                self._fail_at_end()
            found.append(data[position - length : position])
        self._position = position
        try:
            return [value.decode() for value in found]
        except UnicodeDecodeError:
            self._fail("a string is not UTF-8")

    def _string(self, max_bytes: int) -> str:
        length = self._scalar(10)
        if length > max_bytes:
            self._fail(f"a string has {length} bytes; at most {max_bytes} are read")
        try:
            return self._take(length).decode()
        except UnicodeDecodeError:
            self._fail("a string is not UTF-8")

    def _count(self, high: int, low: int = 0) -> int:
        count: int = self._scalar(10)
        if not low <= count <= high:
            self._fail(f"a count or size must be from {low} to {high}, is {count}")
        return count

    def _scalar(self, type_id: int) -> Any:
        if type_id not in _SCALARS:
            self._fail(f"a value of type {type_id} is not known")
        (value,) = _SCALARS[type_id].unpack(self._take(_SCALARS[type_id].size))
        return value

    def _take(self, length: int) -> bytes:
        start = self._position
        if start + length > len(self._data):
            self._fail_at_end()
        self._position = start + length
        return self._data[start : start + length]

    def _fail_at_end(self) -> NoReturn:
        if self._size > len(self._data):
            self._fail(f"the header has more than {MAX_HEADER_BYTES} bytes, which are not read")
        self._fail(f"the file ends here, at byte {self._size}: download it again")

    def _fail(self, rule: str, field: str | None = None) -> NoReturn:
        field = field or self._field
        field = field if len(field) < 100 and field.isprintable() else shown(field)
        raise CheckpointError(f"{self._file} is not a sound GGUF file: {field}: {rule}")

    def _refuse(self, what: str) -> NoReturn:
        tensor = f": {self._field:.100}" if self._field.startswith("tensor") else ""
        raise UnsupportedModelError(f"{self._file}{tensor} {what}")


def _type_name(type_id: int) -> str:
    import gguf

    try:
        return str(gguf.GGMLQuantizationType(type_id).name)
    except ValueError:
        return f"number {type_id}"


MAX_SIZE = 2**24
"""Limit of each size: far above every known model."""


class GGUFMetadata:
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
        """Return `listed_for_layers` if the setting is a list, otherwise None."""
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
