"""Files as people have them: read right, or refused by name."""

import io
import os
import random
import struct
import time
import zlib
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageCms, ImageOps

from nanovllm.features.vision import pixels
from nanovllm.features.vision.family import View
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
        data, lambda width, height: (width, height), lambda size: ([View(*size)], "bicubic")
    )
    return np.frombuffer(rgb, np.uint8).reshape(size[1], size[0], 3)


def turned(how: int, form: str = "PNG", **options: Any) -> bytes:
    """Return the file of a picture that EXIF says is turned."""
    exif = Image.Exif()
    exif[0x0112] = how
    return saved(RGB, form, exif=exif, **options)


def with_alpha(value: int) -> Image.Image:
    image = RGB.convert("RGBA")
    image.putalpha(value)
    return image


def png(
    width: int,
    height: int,
    body: bytes,
    depth: int = 1,
    kind: int = 0,
    more: bytes = b"",
    turn: int = 0,
) -> bytes:
    """Return a PNG of filtered rows `body`. `more`: the name and data of another chunk."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        check = struct.pack(">I", zlib.crc32(kind + data))
        return struct.pack(">I", len(data)) + kind + data + check

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, kind, 0, 0, turn))
    between = chunk(more[:4], more[4:]) if more else b""
    end = chunk(b"IDAT", zlib.compress(body)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + head + between + end


def rows(values: np.ndarray[Any, Any]) -> bytes:
    """Return rows without a filter."""
    return b"".join(b"\0" + row.tobytes() for row in values)


ADAM7 = ((0, 0, 8, 8), (0, 4, 8, 8), (4, 0, 8, 4), (0, 2, 4, 4), (2, 0, 4, 2), (0, 1, 2, 2))


def interlaced(colours: np.ndarray[Any, Any]) -> bytes:
    passes = [colours[y::dy, x::dx] for y, x, dy, dx in (*ADAM7, (1, 0, 2, 1))]
    body = b"".join(rows(each) for each in passes if each.size)
    return png(colours.shape[1], colours.shape[0], body, 8, 2, turn=1)


def tiff(data: bytes, tags: dict[int, int | None], order: str = "<") -> bytes:
    """Return a grey TIFF of 9 x 6 pixels, with other `tags`."""
    fields = {256: 9, 257: 6, 258: 8, 259: 1, 262: 1, 273: -1, 277: 1, 278: 6, 279: len(data)}
    fields = {tag: value for tag, value in sorted({**fields, **tags}.items()) if value is not None}
    start = 14 + 12 * len(fields)
    entries = [
        struct.pack(f"{order}HHII", tag, 4, 1, start if value < 0 else value)
        for tag, value in fields.items()
    ]
    head = b"II*\0" if order == "<" else b"MM\0*"
    head += struct.pack(f"{order}IH", 8, len(fields))
    return head + b"".join(entries) + bytes(4) + data


def at(data: bytes, place: int, value: bytes) -> bytes:
    """Return a file in which something else is at a place."""
    return data[:place] + value + data[place + len(value) :]


def box(kind: bytes, size: int = 24) -> bytes:
    """Return the beginning of a file such as HEIC."""
    return struct.pack(">I", size) + kind + bytes(size)


SRGB = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
WHITE = np.full_like(COLOURS, 255)
HALF = (COLOURS.astype(float) * 128 + 255.0 * 127) / 255
PALETTE = RGB.quantize(16)
EIGHT = (np.asarray(GREY).astype(int) + 128) // 257
GIF = saved(PALETTE, "GIF", save_all=True, append_images=[Image.new("P", (9, 6))])
BLACK = Image.new("RGB", (9, 6))
RED = Image.new("RGB", (9, 6), (200, 30, 60))
REDS = np.array([[[200, 30, 60]]])
BYTES = (GREY // 257).astype(np.uint8)
TILED: dict[int, int | None] = {273: None, 278: None, 279: None, 322: 16, 323: 16, 324: -1}
TILE = np.pad(BYTES, ((0, 10), (0, 7))).tobytes()
ARITHMETIC = (
    "ffd8ffe000104a46494600010100000100010000ffdb0043000302020302020303030304030304050805050404050a"
    "070706080c0a0c0c0b0a0b0b0d0e12100d0e110e0b0b1016101113141515150c0f171816141812141514ffc9000b08"
    "0010001001011100ffcc000600101005ffda0008010100003f00ff00da380feb5dbd5f40ffd9"
)
"""The left half is of 70, the right half of 200; 16 x 16 pixels."""
JPEG = saved(RED, "JPEG")
BMP = saved(RGB, "BMP")
RIGHT: dict[str, tuple[bytes, np.ndarray[Any, Any]]] = {
    "PNG": (saved(RGB, "PNG"), COLOURS),
    "BMP": (saved(RGB, "BMP"), COLOURS),
    "TIFF": (saved(RGB, "TIFF"), COLOURS),
    "TIFF, LZW": (saved(RGB, "TIFF", compression="tiff_lzw"), COLOURS),
    "WebP without loss": (saved(RGB, "WEBP", lossless=True), COLOURS),
    "interlaced": (interlaced(COLOURS), COLOURS),
    "moving PNG": (saved(RGB, "PNG", save_all=True, append_images=[BLACK]), COLOURS),
    "moving WebP": (
        saved(RGB, "WEBP", save_all=True, append_images=[BLACK], lossless=True),
        COLOURS,
    ),
    "ICC profile": (saved(RGB, "PNG", icc_profile=SRGB), COLOURS),
    "RGB of 16 bits": (png(9, 6, rows((COLOURS * np.uint16(257)).astype(">u2")), 16, 2), COLOURS),
    "a colour is transparent": (
        png(9, 6, rows(COLOURS), 8, 2, b"tRNS" + COLOURS[0, 0].astype(">u2").tobytes()),
        np.where((COLOURS[0, 0] == COLOURS).all(-1, keepdims=True), np.uint8(255), COLOURS),
    ),
    "damaged EXIF": (saved(RGB, "PNG", exif=b"Exif\0\0garbage"), COLOURS),
    "pages": (saved(RGB, "TIFF", save_all=True, append_images=[BLACK]), COLOURS),
    "BigTIFF": (saved(RGB, "TIFF", big_tiff=True), COLOURS),
    "TIFF, deflate": (saved(RGB, "TIFF", compression="tiff_adobe_deflate"), COLOURS),
    "fax": (
        saved(RGB.convert("1"), "TIFF", compression="group4"),
        np.asarray(RGB.convert("1").convert("RGB")),
    ),
    "tiles": (tiff(TILE, {**TILED, 325: 256}), np.repeat(BYTES[..., None], 3, 2)),
    "white is 0": (tiff(BYTES.tobytes(), {262: 0}), np.repeat(255 - BYTES[..., None], 3, 2)),
    "big-endian": (
        tiff(GREY.astype(">u2").tobytes(), {258: 16}, ">"),
        np.repeat(EIGHT[..., None], 3, 2),
    ),
    "BMP of a palette": (saved(PALETTE, "BMP"), np.asarray(PALETTE.convert("RGB"))),
    "turned TIFF": (turned(6, "TIFF"), np.rot90(COLOURS, -1)),
    "turned WebP": (turned(8, "WEBP", lossless=True), np.rot90(COLOURS)),
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
    "JPEG": (saved(RED, "JPEG"), REDS),
    "CMYK": (
        saved(RED.convert("CMYK"), "JPEG"),
        REDS,
    ),
    "progressive": (
        saved(Image.new("RGB", (9, 6), (9, 99, 9)), "JPEG", progressive=True),
        np.array([[[9, 99, 9]]]),
    ),
    "grey JPEG": (saved(Image.new("L", (9, 6), 70), "JPEG"), np.array([[[70, 70, 70]]])),
    "WebP": (saved(RED, "WEBP"), REDS),
    "two JPEGs in one": (
        saved(RED, "MPO", save_all=True, append_images=[BLACK]),
        REDS,
    ),
    "arithmetic": (
        bytes.fromhex(ARITHMETIC),
        np.repeat(np.repeat([70, 200], 8)[None, :, None], 3, 2),
    ),
    "CMYK, TIFF": (saved(RED.convert("CMYK"), "TIFF"), REDS),
    "transparent palette": (
        saved(with_alpha(0).quantize(8), "PNG", transparency=0),
        np.array([[[255, 255, 255]]]),
    ),
}
WRONG: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "it is empty"),
    "text": (b"hello", "none of PNG, JPEG.*TIFF$"),
    "SVG": (b"<?xml version='1.0'?>\n<svg xmlns='http://www.w3.org/2000/svg'/>", "but SVG"),
    "HTML": (b"\n<!doctype html>\n<html><svg/>", "but HTML"),
    "PDF": (b"%PDF-1.7\n", "but PDF"),
    "EPS": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "none of PNG, JPEG"),
    "ICO": (saved(RGB.resize((16, 16)), "ICO"), "but an icon"),
    "HEIC": (box(b"ftypheic"), "but HEIC: save it as PNG or JPEG"),
    "AVIF": (box(b"ftypavif"), "but AVIF"),
    "MP4": (box(b"ftypisom"), "but a video"),
    "JPEG 2000": (box(b"jP  ", 12), "but JPEG 2000"),
    "JPEG XL": (b"\xff\x0a\x10", "but JPEG XL"),
    "cut PNG": (saved(RGB, "PNG")[:70], "damaged"),
    "cut JPEG": (saved(RGB.resize((90, 60)), "JPEG")[:-300], "damaged"),
    "floats": (saved(Image.fromarray(np.ones((3, 3), np.float32)), "TIFF"), "mode is F"),
    "12 bits": (tiff(bytes(84), {258: 12}), "a grey TIFF of 12 bits: save it in 8"),
    "32 bits": (tiff(bytes(216), {258: 32}), "a grey TIFF of 32 bits"),
    "signed": (tiff(bytes(108), {258: 16, 339: 2}), "a grey TIFF of 16 bits, signed"),
    "white is 0, 16 bits": (tiff(bytes(108), {258: 16, 262: 0}), "of 16 bits, white as 0"),
    "many strips": (at(tiff(BYTES.tobytes(), {}), 74, b"\xff" * 4), "none of PNG|damaged"),
    "bomb": (png(60000, 60000, bytes(7501 * 100)), "at most 64 million"),
    "JPEG bomb": (at(JPEG, JPEG.index(b"\xff\xc0") + 5, b"\xff" * 4), "65535 x 65535 pixels"),
    "GIF bomb": (at(GIF, 6, b"\xff" * 4), "65535 x 65535 pixels"),
    "BMP bomb": (at(BMP, 18, b"\0\xff\0\0" * 2), "65280 x 65280 pixels"),
    "TIFF bomb": (tiff(bytes(54), {256: 65000, 257: 65000}), "65000 x 65000 pixels"),
    "WebP bomb": (b"RIFF\xff\0\0\0WEBPVP8L\xf0\0\0\0/" + b"\xff" * 3 + bytes(256), "damaged"),
    "profile bomb": (
        png(9, 6, rows(COLOURS), 8, 2, b"iCCPx\0\0" + zlib.compress(bytes(2**21))),
        "too large",
    ),
    "very wide": (png(2**30, 1, bytes(7501 * 100)), "at most 64 million"),
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
    random_ = random.Random(time.time_ns() if "FUZZ_EXAMPLES" in os.environ else 0)
    files = [data for data, _ in (*RIGHT.values(), *NEAR.values())]
    files += [data for data, _ in WRONG.values() if 0 < len(data) < 10**5]
    results: list[str] = []
    for _ in range(int(os.environ.get("FUZZ_EXAMPLES", examples(300)))):
        try:
            read(process, damaged(random_, random_.choice(files)))
            results.append("read")
        except PictureError as error:
            results.append(str(error))
    assert results.count("read") > 2
    assert not [each for each in results if "its process ended" in each]  # a decoder has crashed
