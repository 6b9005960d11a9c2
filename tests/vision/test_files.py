"""Files as people have them: read right, or refused by name."""

import io
import random
import struct
import zlib
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageOps

from nanovllm.features.vision import pixels
from nanovllm.features.vision.picture_process import PictureProcess
from nanovllm.features.vision.pixels import PictureError
from tests.every_case import examples

COLOURS = np.random.default_rng(0).integers(0, 256, (6, 9, 3), dtype=np.uint8)
RGB = Image.fromarray(COLOURS)
GREY = np.arange(54, dtype=np.uint16).reshape(6, 9) * 1200


@pytest.fixture(scope="module")
def process() -> Any:
    found = PictureProcess()
    yield found
    found.shutdown()


def saved(image: Image.Image, form: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def read(process: PictureProcess, data: bytes) -> np.ndarray[Any, Any]:
    """Return the pixels of a file in its own size."""
    size, (rgb,) = process.resized(
        data, lambda width, height: (width, height), lambda size: ([(*size, None)], "bicubic")
    )
    return np.frombuffer(rgb, np.uint8).reshape(size[1], size[0], 3)


def turned(how: int) -> bytes:
    """Return the file of a picture that EXIF says is turned."""
    exif = Image.Exif()
    exif[0x0112] = how
    return saved(RGB, "PNG", exif=exif)


def with_alpha(value: int) -> Image.Image:
    image = RGB.convert("RGBA")
    image.putalpha(value)
    return image


def bomb(width: int, height: int) -> bytes:
    """Return a small PNG of very many pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        check = struct.pack(">I", zlib.crc32(kind + data))
        return struct.pack(">I", len(data)) + kind + data + check

    head = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    body = zlib.compress(bytes((width // 8 + 1) * 100))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", body) + chunk(b"IEND", b"")


WHITE = np.full_like(COLOURS, 255)
HALF = (COLOURS.astype(float) * 128 + 255.0 * 127) / 255
PALETTE = RGB.quantize(16)
EIGHT = (np.asarray(GREY).astype(int) + 128) // 257
GIF = saved(PALETTE, "GIF", save_all=True, append_images=[Image.new("P", (9, 6))])
RIGHT: dict[str, tuple[bytes, np.ndarray[Any, Any]]] = {
    "PNG": (saved(RGB, "PNG"), COLOURS),
    "BMP": (saved(RGB, "BMP"), COLOURS),
    "TIFF": (saved(RGB, "TIFF"), COLOURS),
    "TIFF, LZW": (saved(RGB, "TIFF", compression="tiff_lzw"), COLOURS),
    "WebP without loss": (saved(RGB, "WEBP", lossless=True), COLOURS),
    "interlaced": (saved(RGB, "PNG", optimize=True), COLOURS),
    "palette": (saved(PALETTE, "PNG"), np.asarray(PALETTE.convert("RGB"))),
    "GIF of two": (GIF, np.asarray(Image.open(io.BytesIO(GIF)).convert("RGB"))),
    "grey": (saved(RGB.convert("L"), "PNG"), np.asarray(RGB.convert("L").convert("RGB"))),
    "black and white": (
        saved(RGB.convert("1"), "PNG"),
        np.asarray(RGB.convert("1").convert("RGB")),
    ),
    "16 bits": (saved(Image.fromarray(GREY), "PNG"), np.repeat(EIGHT[..., None], 3, 2)),
    "16 bits, TIFF": (saved(Image.fromarray(GREY), "TIFF"), np.repeat(EIGHT[..., None], 3, 2)),
    "no alpha": (saved(with_alpha(0), "PNG"), WHITE),
    "full alpha": (saved(with_alpha(255), "PNG"), COLOURS),
    "half alpha": (saved(with_alpha(128), "PNG"), HALF),
    "grey and alpha": (
        saved(with_alpha(255).convert("LA"), "PNG"),
        np.asarray(RGB.convert("L").convert("RGB")),
    ),
    "one pixel": (saved(Image.new("RGB", (1, 1), (9, 8, 7)), "PNG"), np.array([[[9, 8, 7]]])),
    "wrong suffix and more behind it": (saved(RGB, "PNG") + b"<html>", COLOURS),
    **{
        f"EXIF {how}": (
            turned(how),
            np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(turned(how))))),
        )
        for how in range(1, 9)
    },
}
NEAR: dict[str, tuple[bytes, np.ndarray[Any, Any]]] = {
    "JPEG": (saved(Image.new("RGB", (9, 6), (200, 30, 60)), "JPEG"), np.array([[[200, 30, 60]]])),
    "CMYK": (
        saved(Image.new("RGB", (9, 6), (200, 30, 60)).convert("CMYK"), "JPEG"),
        np.array([[[200, 30, 60]]]),
    ),
    "progressive": (
        saved(Image.new("RGB", (9, 6), (9, 99, 9)), "JPEG", progressive=True),
        np.array([[[9, 99, 9]]]),
    ),
    "grey JPEG": (saved(Image.new("L", (9, 6), 70), "JPEG"), np.array([[[70, 70, 70]]])),
    "WebP": (saved(Image.new("RGB", (9, 6), (200, 30, 60)), "WEBP"), np.array([[[200, 30, 60]]])),
    "transparent palette": (
        saved(with_alpha(0).quantize(8), "PNG", transparency=0),
        np.array([[[255, 255, 255]]]),
    ),
}
WRONG: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "none of PNG, JPEG"),
    "text": (b"hello", "none of PNG, JPEG"),
    "SVG": (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "none of PNG, JPEG"),
    "PDF": (b"%PDF-1.7\n", "none of PNG, JPEG"),
    "EPS": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "none of PNG, JPEG"),
    "ICO": (saved(RGB.resize((16, 16)), "ICO"), "none of PNG, JPEG"),
    "cut PNG": (saved(RGB, "PNG")[:70], "damaged"),
    "cut JPEG": (saved(RGB.resize((90, 60)), "JPEG")[:-300], "damaged"),
    "floats": (saved(Image.fromarray(np.ones((3, 3), np.float32)), "TIFF"), "mode is F"),
    "bomb": (bomb(60000, 60000), "at most 64 million"),
    "very wide": (bomb(2**30, 1), "at most 64 million"),
    "heavy": (bytes(pixels.MAX_BYTES + 1), "at most 20 MiB"),
}


def test_files_are_read_right(process: PictureProcess) -> None:
    for name, (data, expected) in RIGHT.items():
        found = read(process, data)
        assert found.shape == expected.shape, name
        assert np.abs(found - expected.astype(float)).max() <= 1, name
    for name, (data, expected) in NEAR.items():
        assert np.abs(read(process, data).astype(float) - expected).max() <= 4, name


@pytest.mark.parametrize("name", WRONG)
def test_files_that_are_refused(process: PictureProcess, name: str) -> None:
    data, words = WRONG[name]
    with pytest.raises(PictureError, match=words):
        read(process, data)


def test_a_picture_that_takes_too_much() -> None:
    """It ends the process, and the next one gets another."""
    process = PictureProcess()
    views = [(12000, 12000 + more, None) for more in range(3)], "bilinear"
    with pytest.raises(PictureError, match="cannot be opened: it takes more than 1024 MiB"):
        process.resized(saved(RGB, "PNG"), lambda *_: None, lambda _: views)
    assert (read(process, saved(RGB, "PNG")) == COLOURS).all()
    process.shutdown()


def damaged(random_: random.Random, data: bytes) -> bytes:
    """Return a file with some bytes changed, lost or doubled."""
    found = bytearray(data)
    for _ in range(random_.randint(1, 3)):
        at = random_.randrange(len(found))
        match random_.randrange(4):
            case 0:
                found[at] = random_.randrange(256)
            case 1:
                del found[at : at + random_.randint(1, 20)]
            case 2:
                found[at:at] = found[at : at + random_.randint(1, 40)]
            case _:
                found[at : at + 4] = random_.choice((b"\xff" * 4, bytes(4), b"\x7f\xff\xff\xff"))
        if not found:
            return b""
    return bytes(found)


def test_damaged_files_are_pictures_or_refused(process: PictureProcess) -> None:
    random_ = random.Random(0)
    files = [data for data, _ in (*RIGHT.values(), *NEAR.values())]
    files += [data for data, _ in WRONG.values() if 0 < len(data) < 10**5]
    num_read = 0
    for _ in range(examples(300)):
        try:
            read(process, damaged(random_, random_.choice(files)))
            num_read += 1
        except PictureError:
            pass
    assert num_read > 2
