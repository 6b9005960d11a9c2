"""What a GGUF file's header must keep to; each error names the file, the field and the rule."""

import struct
from pathlib import Path

import pytest

from nanovllm.errors import CheckpointError, UnsupportedModelError
from nanovllm.loading import gguf_header
from nanovllm.loading.gguf_header import read_gguf_header

pytest.importorskip("gguf")  # messages name its types

U32, F32, STRING, ARRAY = 4, 6, 8, 9


def text(value, length=None):
    encoded = value if isinstance(value, bytes) else value.encode()
    return struct.pack("<Q", len(encoded) if length is None else length) + encoded


def field(key, kind, payload):
    return text(key) + struct.pack("<I", kind) + payload


def number(key, value):
    return field(key, U32, struct.pack("<I", value))


def tensor(name, shape=(4, 2), kind=0, offset=0, num_dimensions=None):
    dims = struct.pack(f"<{len(shape)}Q", *shape)
    count = len(shape) if num_dimensions is None else num_dimensions
    return text(name) + struct.pack("<I", count) + dims + struct.pack("<IQ", kind, offset)


def file_of(path, fields=(), tensors=(), *, magic=b"GGUF", version=3, counts=None, data=b""):
    num_tensors, num_fields = counts or (len(tensors), len(fields))
    header = magic + struct.pack("<IQQ", version, num_tensors, num_fields)
    header += b"".join(fields) + b"".join(tensors)
    header += b"\0" * (-len(header) % 32) if tensors else b""
    file = path / "x.gguf"
    file.write_bytes(header + data)
    return file


def test_a_sound_header(tmp_path):
    numbers = struct.pack("<IQ3f", F32, 3, 1, 2, 3)
    words = struct.pack("<IQ", STRING, 2) + text("a") + text("ö")
    fields = [number("n", 7), field("f", ARRAY, numbers), field("s", ARRAY, words)]
    tensors = [tensor("a"), tensor("b", (64, 3), 8, 32)]
    header = read_gguf_header(file_of(tmp_path, fields, tensors, data=bytes(32 + 204)))
    assert header.metadata == {"n": 7, "f": [1.0, 2.0, 3.0], "s": ["a", "ö"]}
    first, second = header.tensors["a"], header.tensors["b"]
    assert (first.type.name, first.shape, first.num_bytes) == ("F32", (2, 4), 32)
    assert (second.type.name, second.shape, second.num_bytes) == ("Q8_0", (3, 64), 204)
    assert (first.offset % 32, second.offset - first.offset) == (0, 32)


HUGE = 2**63


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"magic": b"GGML"}, r"magic: the file must begin with GGUF, begins with b'GGML'"),
        ({"version": 1}, "has GGUF version 1; 2 and 3 are read"),
        ({"version": 3 << 24}, "is big-endian"),
        ({"counts": (HUGE, 0)}, r"tensor count: .* from 0 to 65536, is 9223372036854775808"),
        ({"counts": (0, HUGE)}, r"metadata count: .* from 0 to 4096, is 9223372036854775808"),
        ({"counts": (0, 3)}, r"key 0: the file ends here, at byte 24"),
        ({"fields": [text("k", HUGE)]}, r"key 0: a string has 9223372036854775808 bytes; at most"),
        ({"fields": [text(b"\xff") + b"\0" * 9]}, "key 0: a string is not UTF-8"),
        ({"fields": [field("k", 13, b"")]}, "k: a value of type 13 is not known"),
        ({"fields": [field("k", STRING, text("", HUGE))]}, "k: a string has 9223372036854775808"),
        ({"fields": [number("k", 1), number("k", 2)]}, "k: the key appears twice"),
        (
            {"fields": [field("k", ARRAY, struct.pack("<IQ", U32, HUGE))]},
            "k: a count or size must be from 0 to 2097152",
        ),
        (
            {"fields": [field("k", ARRAY, struct.pack("<IQ", U32, 9))]},
            "k: the file ends here",
        ),
        (
            {"fields": [field("k", ARRAY, struct.pack("<IQ", STRING, 2) + text("a", 99))]},
            "k: the file ends here",
        ),
        (
            {"fields": [field("k", ARRAY, struct.pack("<IQ", STRING, 1) + text("a" * 1025))]},
            "k: a string has 1025 bytes; at most 1024",
        ),
        (
            {"fields": [field("k", ARRAY, struct.pack("<IQ", ARRAY, 1))]},
            "k: an array of type 9 is not read",
        ),
        ({"fields": [number("general.alignment", 24)]}, "alignment: must be a power of two"),
        ({"fields": [number("general.alignment", 0)]}, "alignment: must be a power of two"),
        ({"tensors": [tensor("t"), tensor("t")]}, "tensor t: the name appears twice"),
        ({"tensors": [tensor("t", num_dimensions=2**31)]}, "tensor t: must have 1 to 4 dim"),
        ({"tensors": [tensor("t", (0, 2))]}, "tensor t: .* from 1 to 4294967296, is 0"),
        ({"tensors": [tensor("t", (2**32, 2**32))]}, "tensor t: ends at byte"),
        ({"tensors": [tensor("t", offset=HUGE)]}, "tensor t: its offset must be 0, is 92233"),
        ({"tensors": [tensor("t", (33, 2), 8)]}, "tensor t: the row length of a Q8_0 must be a"),
        ({"tensors": [tensor("t")], "data": bytes(31)}, "tensor t: ends at byte .*: download"),
        ({"tensors": [tensor("t", kind=16)]}, r"tensor t has type IQ2_XXS, .* \(F32, F16, Q4_0"),
        ({"tensors": [tensor("t", kind=999)]}, "tensor t has type number 999"),
    ],
)
def test_a_header_that_is_not_sound(tmp_path, arguments, said):
    with pytest.raises(CheckpointError, match=said) as raised:
        read_gguf_header(file_of(tmp_path, **arguments))
    assert "x.gguf" in str(raised.value)
    assert len(str(raised.value)) < 1000


def test_types_and_versions_are_unsupported_not_unsound(tmp_path):
    with pytest.raises(UnsupportedModelError):
        read_gguf_header(file_of(tmp_path, version=4))


def test_many_elements_in_many_arrays(tmp_path):
    array = field("k", ARRAY, struct.pack("<IQ", 0, 2**20) + bytes(2**20))
    fields = [array.replace(b"k", bytes([letter]), 1) for letter in b"abc"]
    with pytest.raises(CheckpointError, match="c: all arrays together have more than 2097152"):
        read_gguf_header(file_of(tmp_path, fields))


def test_a_header_of_many_megabytes_is_not_read(tmp_path, monkeypatch):
    monkeypatch.setattr(gguf_header, "MAX_HEADER_BYTES", 1000)
    fields = [field("k", STRING, text("x" * 2000))]
    with pytest.raises(CheckpointError, match="k: the header has more than 1000 bytes"):
        read_gguf_header(file_of(tmp_path, fields))


def test_a_file_that_cannot_be_read(tmp_path):
    (tmp_path / "x.gguf").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"x\.gguf: a GGUF file has at least 24 bytes"):
        read_gguf_header(tmp_path / "x.gguf")
    with pytest.raises(CheckpointError, match=r"cannot read .*y\.gguf"):
        read_gguf_header(Path(tmp_path / "y.gguf"))
