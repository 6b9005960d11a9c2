"""The memory of a KV pool: which bytes of a page belong to which layer, and their zeroing.

A page holds a KV block of some layers, whose parts are adjacent.
"""

import dataclasses
from collections.abc import Sequence as Seq
from typing import NamedTuple

import torch

from nanovllm.core.worker_info import WindowSpec
from nanovllm.kernels.cpu.library import library, torch_on_one_thread
from nanovllm.kernels.cpu.ops import copy_pages
from nanovllm.kernels.states import aligned
from nanovllm.platform import Platform
from nanovllm.utils.memory import populate, return_pages

_BYTES_AHEAD = 32 * 2**20  # bytes of memory kept ready after the last page in use


class KVPlace(NamedTuple):
    """Where a layer's keys and values are."""

    table: int  # the block table that has the ids of its pages
    offset: int  # bytes from the start of a page


@dataclasses.dataclass(frozen=True)
class PageLayout:
    """How layers share the pages of a pool. See core/worker_info.py."""

    page_bytes: int
    places: tuple[KVPlace, ...]  # of each layer
    windows: tuple[WindowSpec, ...]


def page_layout(sizes: Seq[int], windows: Seq[int | None], least_bytes: int = 0) -> PageLayout:
    """Return the layout for layers whose block takes `sizes` bytes, in pages of `least_bytes`.

    Layers with full attention, whose window is None, share one page. Those with equal windows get
    separate pages, as many as they need. If no layer has full attention, all share one page.
    """
    sizes = [aligned(size) for size in sizes]
    groups: dict[int | None, list[int]] = {None: []}
    for index, window in enumerate(windows):
        groups.setdefault(window, []).append(index)
    if not groups[None]:
        groups = {None: list(range(len(sizes)))}
    page_bytes = sum(sizes[index] for index in groups[None])
    page_bytes = max([page_bytes, least_bytes, *sizes])
    places = {}
    table = -1
    found = []
    for window, indices in groups.items():
        first = table + 1
        used = page_bytes
        for index in indices:
            if used + sizes[index] > page_bytes:
                table += 1
                used = 0
            places[index] = KVPlace(table, used)
            used += sizes[index]
        if window is not None:
            found.append(WindowSpec(window, table + 1 - first))
    ordered = tuple(places[index] for index in range(len(sizes)))
    return PageLayout(page_bytes, ordered, tuple(found))


class KVPool:
    """A zeroed pool. Masked keys must be finite, as in `Schedule.blocks_to_zero`.

    Dimension 1 of a layer's cache counts the blocks. A page's bytes lie side by side if it is
    `by_page`. Else each layer's cache is contiguous, which needs layers that share one page.
    """

    def __init__(
        self,
        layout: PageLayout,
        shapes: Seq[tuple[int, ...]],
        dtype: torch.dtype,
        platform: Platform,
        *,
        by_page: bool,
    ) -> None:
        self.num_blocks = shapes[0][1]
        self._platform = platform
        self._by_page = by_page
        shape = (self.num_blocks, layout.page_bytes) if by_page else (len(shapes), *shapes[0])
        memory = (shape, torch.uint8 if by_page else dtype)
        self._pool = platform.zeros(*memory)
        self._num_populated = 0  # pages
        if not by_page:
            self.layers = list(self._pool)
            return
        self.layers = []
        for place, (first, _, *rest) in zip(layout.places, shapes, strict=True):
            size = torch.Size((first, *rest)).numel() * dtype.itemsize
            part = self._pool[:, place.offset : place.offset + size]
            self.layers.append(part.view(dtype).view(-1, first, *rest).movedim(0, 1))
        self.populate_beyond(0)

    def zero(self, blocks: list[int]) -> None:
        """Fill pages `blocks` with 0."""
        if not self._platform.in_host_memory:  # one kernel; torch has none for FP8, so fill bytes
            dim = 0 if self._by_page else 2
            self._pool.view(torch.uint8).index_fill_(dim, self._platform.upload(blocks), 0)
            return
        with torch_on_one_thread():
            for block in blocks:
                (self._pool[block] if self._by_page else self._pool[:, :, block]).zero_()

    def give_back(self) -> None:
        """Give a CPU's memory to the system, while no step runs; the pages are zeros again."""
        return_pages(self._pool.view(torch.uint8).view(-1))
        self._num_populated = 0

    @property
    def pages(self) -> torch.Tensor:
        """The memory, [num_blocks, page_bytes] uint8, of a pool whose pages are contiguous."""
        assert self._by_page
        return self._pool

    @property
    def device(self) -> torch.device:
        return self._pool.device

    @property
    def page_bytes(self) -> int:
        """Bytes of a page, of all layers together."""
        return self._pool.nbytes // self.num_blocks

    def gather(self, pages: Seq[int]) -> torch.Tensor:
        """Return a copy of pages, [len(pages), page_bytes] uint8."""
        indices = self._platform.upload(pages)
        if self._by_page:
            return self._pool[indices]
        found = self._pool.view(torch.uint8).index_select(2, indices)
        return found.movedim(2, 0).reshape(len(pages), -1)

    def scatter(self, pages: Seq[int], rows: torch.Tensor) -> None:
        """Write what `gather` returned to pages."""
        indices = self._platform.upload(pages)
        if self._by_page:
            self._pool[indices] = rows
            return
        whole = self._pool.view(torch.uint8)
        layers, parts, _, *rest = whole.shape
        rows = rows.view(len(pages), layers, parts, *rest).movedim(0, 2)
        whole.index_copy_(2, indices, rows)

    def copy(self, sources: Seq[int], targets: Seq[int]) -> None:
        """Copy pages `sources` to pages `targets`, as in `PageCopy`."""
        pool = self.pages
        if not self._platform.in_host_memory:
            pages = self._platform.upload([*sources, *targets]).view(2, -1)
            pool[pages[1]] = pool[pages[0]]
        elif library() is not None:
            copy_pages(pool, sources, targets)
        else:
            for source, target in zip(sources, targets, strict=True):
                pool[target] = pool[source]
        self.populate_beyond(max(targets))

    def populate_beyond(self, block: int) -> None:
        """On a CPU, which gives memory to pages as they are used, have it ready for those after
        `block`.
        """
        start = self._num_populated
        by_page = self._by_page and self._platform.in_host_memory
        if by_page and start < self.num_blocks and block + 1 >= start:
            self._num_populated = block + 1 + -(-_BYTES_AHEAD // self._pool[0].nbytes)
            populate(self._pool, self._pool[start : self._num_populated])
