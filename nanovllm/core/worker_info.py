"""`WorkerInfo`: what the workers tell the engine at start-up. Imports nothing.

Layers with equal caches form a group. Group 0 has the layers that attend to all tokens: a block of
`block_size` tokens takes one page of the pool, whose id is in block table 0. A window group takes
`pages` pages for a block, whose ids are in as many further block tables. All pages are equal.
"""

import dataclasses
from collections.abc import Sequence as Seq
from typing import NamedTuple


class WindowSpec(NamedTuple):
    """Layers that attend to a window of equally many tokens."""

    window: int  # a token sees itself and the window - 1 tokens before it
    pages: int  # pages of the pool that a block takes: as many block tables

    def first_block(self, position: int, block_size: int) -> int:
        """Return the index of the first block that a token at `position`, or after it, reads."""
        return max(0, position - self.window + 1) // block_size


def num_tables(windows: Seq[WindowSpec]) -> int:
    """Return the number of block tables of a sequence, table 0 included."""
    return 1 + sum(group.pages for group in windows)


def pages_for(
    num_tokens: int, block_size: int, windows: Seq[WindowSpec], max_num_batched_tokens: int
) -> int:
    """Return the most pages that a sequence of up to `num_tokens` tokens needs at any time.

    A step computes up to `max_num_batched_tokens` tokens. Before these a window group holds
    `window` tokens: see `WindowGroup`.
    """
    num_blocks = -(-num_tokens // block_size)
    num_pages = num_blocks
    for window, pages in windows:
        length = window + max_num_batched_tokens
        touched = (length + block_size - 2) // block_size + 1  # of `length` tokens, at the worst
        num_pages += pages * min(num_blocks, touched)
    return num_pages


class Arithmetic(NamedTuple):
    """What decides the bits of an answer, besides the request and the checkpoint."""

    batch_invariant: bool
    """Whether an answer has the same bits whatever else runs and however it is computed: all of the
    model is computed by C kernels, none of which mixes rows. False gives no guarantee."""
    dtype: str
    weights: str  # how linear layers are stored: a dtype, an option of `quantization`, or a format
    kv_cache: str
    kernels: str  # for those in C their instructions, and the file that was compiled here
    num_ranks: int


class KVInfo(NamedTuple):
    """What the layers keep of each sequence, besides a page for each block."""

    windows: tuple[WindowSpec, ...] = ()  # the groups of layers with separate block tables
    state_pages: int = 0  # pages that hold the state of one sequence; 0: the model has no state
    causal: bool = True
    """Whether a token sees only those before it. If not, a prompt is computed in one step, nothing
    of it is cached, and nothing is generated."""
    picture_tokens: int = 0  # at most so many tokens of a picture see each other; 0: none do


class DraftInfo(NamedTuple):
    """What speculation can do, and what it costs."""

    max_draft_tokens: int = 0  # of a row; 0 without speculation
    follows_drafts: bool = False
    """Whether rows with `num_unverified_tokens` can run: in steps of rows with one known token
    each, whose parameters are plain."""
    step_seconds: tuple[tuple[int, float], ...] = ()  # (tokens, seconds) of decode steps, ascending
    draft_seconds: tuple[tuple[int, float, float], ...] = ()
    """(rows, seconds of proposing the first token for each row, seconds of each further one),
    ascending; empty if it costs nothing."""


class TierInfo(NamedTuple):
    """The tiers below the KV pool."""

    num_host_slots: int = 0  # pages of host memory for entries of the prefix cache
    kv_namespace: str = ""  # a digest of what KV depends on besides tokens; "" without a store
    token_seconds: float = 0.0  # how long computing a token of a prompt takes
    page_seconds: float = 0.0  # how long copying a page from host memory takes


class EncoderInfo(NamedTuple):
    """What encoding a picture costs beside a token of the text model, and what it leaves."""

    num_layers: int  # of the tower
    hidden_size: int  # of its states
    layer_weights: int  # of one of its layers
    token_weights: int  # of the text model
    bytes_per_token: int  # of the embedding of a soft token
    local_layers: Seq[int] = ()  # whose patches see only those near them

    def price(self, num_patches: int, layer: int) -> float:
        """Return what a layer costs for a view, in tokens of the text model."""
        seen = 0 if layer in self.local_layers else num_patches
        of_patch = self.layer_weights + 2 * seen * self.hidden_size
        return num_patches * of_patch / self.token_weights


@dataclasses.dataclass(frozen=True, slots=True)
class WorkerInfo:
    """Sizes that the workers found at start-up."""

    num_blocks: int  # that every rank can hold: the minimum over the ranks
    block_size: int
    max_model_len: int  # Config.max_model_len, or the model's number of positions if that is less
    vocab_size: int
    max_num_batched_tokens: int  # Config.max_num_batched_tokens, or the device's default
    runs_ahead: bool = False
    """Whether steps run asynchronously to the host. If so, the engine launches a step before it
    knows the tokens of the previous one."""
    kv: KVInfo = dataclasses.field(default_factory=KVInfo)
    drafts: DraftInfo = dataclasses.field(default_factory=DraftInfo)
    tiers: TierInfo | None = None
    encoder: EncoderInfo | None = None  # None: the model reads no pictures
    arithmetic: Arithmetic | None = None  # None before the model has been recorded
