"""Files and arrays to RGB pixels of a given size, on Pillow. Nothing is fetched from a network.

This file also runs alone, in the process that opens files: it imports nothing of ours.
"""

import io
import re
from collections.abc import Sequence
from typing import Any

from PIL import Image, ImageOps, UnidentifiedImageError

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
MAX_BYTES = 20 * 2**20
"""Of a file."""
MAX_PIXELS = 64_000_000
"""Of a picture, known before any is decoded."""
_MODES = frozenset(("1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBa", "La", "CMYK", "YCbCr", "LAB"))
_WITH_ALPHA = frozenset(("LA", "PA", "RGBA", "RGBa", "La"))
_DEEP = ("I;16", "I;16L", "I;16B", "I;16N", "I")
_OTHERS = {
    "AVIF": rb".{4}ftypavi",
    "HEIC": rb".{4}ftyp(hei|hev|mif|msf)",
    "a video": rb".{4}ftyp|\x1aE\xdf\xa3",
    "JPEG 2000": rb".{4}jP  |\xffO\xffQ",
    "JPEG XL": rb".{4}JXL |\xff\x0a",
    "PDF": rb"%PDF",
    "an icon": rb"\0\0\x01\0",
    "HTML": rb"[^<]*<(!DOCTYPE )?html",
    "SVG": rb"[^<]*<(svg|[?!].*<svg)",
}
"""Files that people take for pictures, and how they begin."""

Box = tuple[int, int, int, int]


class PictureError(ValueError):
    """A file or an array is no picture that is read here."""


def opened(data: bytes) -> Image.Image:
    """Return the first picture of a file, decoded, upright, in RGB.

    Raises:
        PictureError: it is too large, of another format, or damaged.
    """
    if not data:
        raise PictureError("it is empty")
    if len(data) > MAX_BYTES:
        raise PictureError(
            f"it has {len(data)} bytes, at most {MAX_BYTES >> 20} MiB are read: make it smaller"
        )
    try:
        image = Image.open(io.BytesIO(data), formats=FORMATS)
        check_size(image.width, image.height)
        image.load()
        _check_tiff(image)
        _turn(image)
        return as_rgb(image)
    except UnidentifiedImageError:
        raise PictureError(f"it is none of {', '.join(FORMATS)}{_but(data)}") from None
    except PictureError:
        raise
    except Exception as error:  # decoders raise all kinds for damaged files
        reason = f"{error}"[:200] or type(error).__name__
        raise PictureError(f"it is damaged, or not supported: {reason}") from error


def _but(data: bytes) -> str:
    """Return what a file is that is none of FORMATS, if that is known."""
    for kind, pattern in _OTHERS.items():
        if re.match(pattern, data[:1000], re.DOTALL | re.IGNORECASE):
            return f", but {kind}: save it as PNG or JPEG"
    return ""


def _check_tiff(image: Image.Image) -> None:
    """Raise PictureError for greys that Pillow would take for others."""
    tags = getattr(image, "tag_v2", None)
    if tags is None or image.mode not in _DEEP:
        return
    bits, is_negative, form = (tags.get(tag, (1,)) for tag in (258, 262, 339))
    is_signed = tuple(form) != (1,)
    if tuple(bits) != (16,) or is_signed or is_negative == 0:
        kind = f"{bits[0]} bits" + ", signed" * is_signed + ", white as 0" * (is_negative == 0)
        raise PictureError(f"it is a grey TIFF of {kind}: save it in 8 bits")


def _turn(image: Image.Image) -> None:
    """Turn a picture upright in place, if its EXIF data is whole and says how."""
    try:
        ImageOps.exif_transpose(image, in_place=True)
    except MemoryError:
        raise
    except Exception:  # what is said beside the picture is damaged, and it is not
        pass


def check_size(width: int, height: int) -> None:
    """Raise PictureError for a picture without pixels, or with too many."""
    if width < 1 or height < 1 or width * height > MAX_PIXELS:
        raise PictureError(
            f"it has {width} x {height} pixels, at least 1 and at most {MAX_PIXELS // 10**6} "
            "million are read: make it smaller"
        )


def as_rgb(image: Image.Image) -> Image.Image:
    """Return a picture in RGB: what is transparent is white, 16 bits become 8.

    Raises:
        PictureError: its numbers are no brightness of 8 or 16 bits.
    """
    if image.mode in _DEEP:
        image = image.convert("I")
        extrema: Any = image.getextrema()
        low, high = extrema
        if low < 0 or high > 65535:
            raise PictureError("its numbers have more than 16 bits")
        image = image.point(lambda value: value / 257 + 0.5).convert("L")
    if image.mode not in _MODES:
        raise PictureError(f"its mode is {image.mode}, which is no picture in 8 or 16 bits")
    if image.mode in _WITH_ALPHA or "transparency" in image.info:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, (255, 255, 255, 255))
        image = Image.alpha_composite(white, image)
    return image.convert("RGB")


def from_array(given: Any) -> Image.Image:
    """Return a numpy array [height, width, 3 or 4] or [height, width] of uint8 as RGB.

    Raises:
        PictureError: it has another shape or dtype.
    """
    shape = tuple(given.shape)
    if given.dtype.name != "uint8" or not (
        len(shape) == 2 or (len(shape) == 3 and shape[2] in (3, 4))
    ):
        raise PictureError(
            "an array must be uint8 [height, width], or with 3 or 4 colours last, got "
            f"{given.dtype.name} {list(shape)}"
        )
    check_size(shape[1], shape[0])
    return as_rgb(Image.fromarray(given))


def resized(
    image: Image.Image, views: Sequence[tuple[int, int, Box | None]], resample: str
) -> list[bytes]:
    """Return the RGB bytes of each view: the picture in a size, or a box of that."""
    found = []
    whole: dict[tuple[int, int], Image.Image] = {}
    for width, height, box in views:
        if (width, height) not in whole:
            whole[width, height] = image.resize((width, height), Image.Resampling[resample.upper()])
        view = whole[width, height]
        found.append((view if box is None else view.crop(box)).tobytes())
    return found
