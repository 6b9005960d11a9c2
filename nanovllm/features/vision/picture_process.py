"""Opens pictures in a separate process, with limits on time and memory.

A file comes from anyone, and decoders are written in C: a process can be ended at any place.

This file is the program of that process, too. So it imports only the standard library at its top.
"""

import io
import json
import math
import runpy
import threading
from collections.abc import Callable, Sequence as Seq
from pathlib import Path
from types import SimpleNamespace
from typing import IO, TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from nanovllm.features.vision.family import View
    from nanovllm.utils.limited_process import Limits

MAX_SECONDS = 10.0  # of processor time, to open a file or to resize it
MAX_BYTES = 2**30  # besides what Python and Pillow take: 64 million pixels in RGBA, four times

Found = TypeVar("Found")


class PictureProcess:
    """Opens and resizes pictures, one at a time. Many threads may call it at once."""

    def __init__(self) -> None:
        from nanovllm.utils.limited_process import LimitedProcess  # the process does without

        self._process = LimitedProcess(__file__, MAX_SECONDS, MAX_BYTES)
        self._lock = threading.Lock()

    def resized(
        self,
        data: bytes,
        choose: Callable[[int, int], Found],
        views: Callable[[Found], "tuple[Seq[View], str]"],
    ) -> tuple[Found, list[bytes]]:
        """Return what `choose` returns for the width and height of a file's picture, and the RGB
        bytes of each of its `views`, as `pixels.resized` takes them.

        Raises:
            PictureError: it is no picture, or damaged, or it takes too much time or memory.
        """
        with self._lock:
            width, height = json.loads(self._ask(b"open", data))
            found = choose(width, height)
            wanted = views(found)
            raw = self._ask(b"size", json.dumps(wanted).encode())
        reply = io.BytesIO(raw)
        return found, [reply.read(3 * math.prod(view.size)) for view in wanted[0]]

    def _ask(self, kind: bytes, data: bytes) -> bytes:
        from nanovllm.features.vision.pixels import PictureError
        from nanovllm.utils.limited_process import LimitError

        try:
            reply = self._process.ask(kind + data)
        except LimitError as error:
            raise PictureError(f"it cannot be opened: {error}") from error
        if reply[:1] != b"+":
            raise PictureError(reply[1:].decode())
        return reply[1:]

    def shutdown(self) -> None:
        """End the process. It is started again when needed."""
        self._process.shutdown()


# From here on: what runs in the process.


def main(limits: "Limits", requests: IO[bytes], replies: IO[bytes]) -> None:
    """Answer requests until there are no more."""
    from PIL import Image

    pixels = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("pixels.py"))))

    Image.init()  # import all decoders before memory is limited
    Image.MAX_IMAGE_PIXELS = None  # `pixels.check_size` looks
    limits.memory(MAX_BYTES)
    opened: list[Image.Image] = []

    def answer(request: bytes) -> bytes:
        kind, data = request[:4], request[4:]
        try:
            if kind == b"open":
                opened.clear()
                opened.append(pixels.opened(data))
                return b"+" + json.dumps(opened[0].size).encode()
            views, resample = json.loads(data)
            found: Seq[bytes] = pixels.resized(opened.pop(), views, resample)
            return b"+" + b"".join(found)
        except pixels.PictureError as error:
            return b"-" + str(error).encode()

    limits.serve(requests, replies, MAX_SECONDS, answer)
