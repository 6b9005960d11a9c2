"""The pictures that the demo model learns to see.

A scene is a square of four corners. Each corner is empty or has a shape or a digit in one of six
colours. Scenes that are asked about have one digit at most.
"""

import functools
import random
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageDraw, ImageFont

SHAPES = ("circle", "square", "triangle", "cross", "ring")
DIGITS = tuple("0123456789")
KINDS = SHAPES + DIGITS
CORNERS = ("top left", "top right", "bottom left", "bottom right")

COLOURS: dict[str, tuple[tuple[int, int, int], ...]] = {
    "red": ((255, 0, 0), (200, 30, 30), (230, 60, 50)),
    "green": ((0, 128, 0), (0, 220, 30), (60, 180, 80)),
    "blue": ((0, 0, 255), (30, 60, 170), (60, 110, 230)),
    "yellow": ((255, 255, 0), (240, 210, 30), (255, 225, 60)),
    "purple": ((128, 0, 128), (150, 60, 200), (110, 40, 150)),
    "orange": ((255, 165, 0), (255, 130, 0), (240, 140, 40)),
}
"""A colour is a mixture of these."""

NEVER_TRAINED = frozenset(
    {
        ("triangle", "purple"),
        ("cross", "yellow"),
        ("ring", "green"),
        ("square", "orange"),
        ("7", "blue"),
        ("3", "red"),
        ("8", "yellow"),
        ("0", "purple"),
    }
)
"""Kinds in colours that only the held-out scenes have."""


class Thing(NamedTuple):
    """A shape or a digit."""

    kind: str
    colour: str

    def __str__(self) -> str:
        return f"{'an' if self.colour == 'orange' else 'a'} {self.colour} {self.kind}"


Scene = tuple[Thing | None, ...]
"""What is in each of the four corners."""


def random_scene(rng: random.Random, held_out: bool = False, most_digits: int = 1) -> Scene:
    """Return a scene of one to four things; only `held_out` ones may have `NEVER_TRAINED`."""
    corners: list[Thing | None] = [None] * len(CORNERS)
    filled = rng.sample(range(len(CORNERS)), rng.randint(1, len(CORNERS)))
    digits = filled[: rng.randint(0, most_digits)]
    for corner in filled:
        kinds = DIGITS if corner in digits else SHAPES
        while True:
            thing = Thing(rng.choice(kinds), rng.choice(list(COLOURS)))
            if held_out or thing not in NEVER_TRAINED:
                break
        corners[corner] = thing
    return tuple(corners)


def draw(rng: random.Random, scene: Scene, side: int | None = None) -> Image.Image:
    """Return a picture of the scene; its side, the background, sizes and places are random."""
    side = side or rng.choice((96, 112, 128, 144, 192))
    noise = np.random.default_rng(rng.getrandbits(32))
    shade = rng.choice((rng.uniform(190, 255), rng.uniform(0, 45)))
    tint = [min(255.0, max(0.0, shade + rng.uniform(-8, 8))) for _ in range(3)]
    image = Image.new("RGB", (side, side), tuple(int(value) for value in tint))
    for corner, thing in enumerate(scene):
        if thing is not None:
            size = rng.uniform(0.26, 0.42) * side
            free = side / 2 - size
            x = (corner % 2) * side / 2 + rng.uniform(0.1, 0.9) * free + size / 2
            y = (corner // 2) * side / 2 + rng.uniform(0.1, 0.9) * free + size / 2
            _draw_thing(rng, image, thing, (x, y), size)
    grain = rng.choice((0, 4, 10))
    if not grain:
        return image
    pixels = noise.standard_normal((side, side, 3), dtype=np.float32)
    pixels = pixels * grain + np.asarray(image)
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8))


def _draw_thing(
    rng: random.Random,
    image: Image.Image,
    thing: Thing,
    middle: tuple[float, float],
    size: float,
) -> None:
    """Draw at three times the size, turn a little, shrink, and paste."""
    large = round(3 * size)
    mask = Image.new("L", (large, large))
    canvas = ImageDraw.Draw(mask)
    end, half = large - 1, large / 2
    width = rng.uniform(0.22, 0.36) * large
    if thing.kind == "circle":
        canvas.ellipse((0, 0, end, end), fill=255)
    elif thing.kind == "ring":
        canvas.ellipse((0, 0, end, end), outline=255, width=round(0.7 * width))
    elif thing.kind == "square":
        edge = 0.08 * large
        canvas.rectangle((edge, edge, end - edge, end - edge), fill=255)
    elif thing.kind == "triangle":
        canvas.polygon(((half, 0.04 * large), (end, 0.92 * large), (0, 0.92 * large)), fill=255)
    elif thing.kind == "cross":
        canvas.rectangle((half - width / 2, 0, half + width / 2, end), fill=255)
        canvas.rectangle((0, half - width / 2, end, half + width / 2), fill=255)
    else:
        font = _font(round(1.25 * large))
        canvas.text((half, half), thing.kind, font=font, fill=255, anchor="mm")
    mask = mask.rotate(rng.uniform(-8, 8), Image.Resampling.BILINEAR)
    small = max(8, round(size))
    mask = mask.resize((small, small), Image.Resampling.BOX)
    shades = COLOURS[thing.colour]
    share = rng.random()
    colour = tuple(
        round(min(255.0, max(0.0, share * a + (1 - share) * b + rng.uniform(-8, 8))))
        for a, b in zip(rng.choice(shades), rng.choice(shades), strict=True)
    )
    image.paste(colour, (round(middle[0] - small / 2), round(middle[1] - small / 2)), mask)


@functools.cache
def _font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(size)
