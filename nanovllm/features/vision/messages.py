"""What requests, the scheduler and ranks say to each other of pictures. No torch."""

from typing import NamedTuple

NAME = "vision"
"""Of what these are in the extras of sequences and of steps."""


class Pixels(NamedTuple):
    """A view of a picture, resized."""

    height: int
    width: int
    rgb: bytes  # [height, width, 3] uint8
    num_patches: int


class Picture(NamedTuple):
    """A picture as the tower reads it."""

    digest: bytes  # SHA-256 of all below, and of how they were made
    views: tuple[Pixels, ...]
    num_tokens: int

    @property
    def num_patches(self) -> int:
        """Of the largest view."""
        return max(view.num_patches for view in self.views)

    @property
    def num_parts(self) -> int:
        """In how many parts each layer of the tower is computed: its keys and values, then what is
        left of up to 512 patches each; or all at once.
        """
        return 1 - (-self.num_patches // 512) if self.num_patches > 512 else 1


class PictureSpan(NamedTuple):
    """Soft tokens of a prompt, one after the other, that stand for a part of a picture."""

    start: int  # position of the first
    length: int
    digest: bytes
    offset: int  # of the first among the picture's tokens
    place: int = 0  # of the first token's time, row and column
    grid: tuple[int, int] = (0, 0)  # rows, columns of the picture's tokens; (0, 0): one place each

    @property
    def end(self) -> int:
        """The position after the last."""
        return self.start + self.length

    @property
    def next_place(self) -> int:
        """The place of the token after the last."""
        return self.place + (max(self.grid) or self.length)


class TowerSlice(NamedTuple):
    """Some of the work of encoding a picture: parts of the tower's layers, view after view."""

    digest: bytes
    num_parts: int
    picture: Picture | None  # with the first slice


class EncoderStep(NamedTuple):
    """What a step does with pictures, before its rows."""

    dropped: list[bytes]  # digests of pictures whose embeddings are not needed any more
    slices: list[TowerSlice]
