"""`KVCacheGroup`: layers with equal caches, and what the block manager asks each group."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence as Seq

from nanovllm.core.messages import Admission, NewBlocks, PageCopy, Row
from nanovllm.core.sequence import Sequence
from nanovllm.kv.pool import BlockPool
from nanovllm.kv.trie import Hit, Node, PrefixTrie


@dataclasses.dataclass(slots=True)
class StepPages:
    """The pages in a step's message. Each group adds its own."""

    rows: Seq[Row]
    admissions: Seq[Admission]
    sequences: Mapping[int, Sequence]  # by id
    width: int  # of a block table
    new_blocks: list[NewBlocks] = dataclasses.field(default_factory=list)
    blocks_to_zero: list[int] = dataclasses.field(default_factory=list)
    copies: list[PageCopy] = dataclasses.field(default_factory=list)


class KVCacheGroup:
    """What layers with equal caches keep of each sequence, in pages of the pool.

    A group knows the pool and the trie, and no other group. An admission first asks every group
    what it lacks, then lets every group `begin` and `extend`. Default methods are no-ops.
    """

    suffix: bytes  # ends the keys of the group's entries in lower tiers; groups differ in it
    num_tables: int  # block tables in a row of the workers' tables
    grows = True  # whether a longer sequence needs more pages of the group
    max_extra_tokens = 0  # how many tokens more than it was given `row_length` may return

    pool: BlockPool
    trie: PrefixTrie
    block_size: int
    first_table: int  # the group's first one; it begins at first_table * width in a table row

    def attach(self, pool: BlockPool, trie: PrefixTrie, first_table: int) -> None:
        """Receive the pool and the trie: the block manager calls this once, first of all."""
        self.pool = pool
        self.trie = trie
        self.block_size = trie.block_size
        self.first_table = first_table
        trie.followers.append(self)

    # What the prefix cache has:

    def needed(self, num_blocks: int) -> range:
        """Return the indices of the blocks of a prefix at which a hit needs entries of the group.

        A block that is needed for a prefix is needed for each shorter one that has it.
        """
        return range(0)

    def has(self, node: Node) -> bool:
        """Return whether an entry at `node` can be hit."""
        return False

    def longest_hit(self, num_blocks: int, has: Callable[[int], bool]) -> int:
        """Return the longest prefix of up to `num_blocks` blocks that the group can serve, if it
        `has` an entry at a block index.
        """
        while num_blocks:
            missing = (index for index in reversed(self.needed(num_blocks)) if not has(index))
            index = next(missing, None)
            if index is None:
                return num_blocks
            num_blocks = index
        return 0

    # An admission, and each longer row:

    def num_missing(self, seq: Sequence, num_tokens: int, hit: Hit | None = None) -> int:
        """Return how many free pages the first `num_tokens` tokens of a sequence take. Those of the
        `hit` of an admission count, too; without one the sequence runs.
        """
        return 0

    def begin(self, seq: Sequence, hit: Hit, num_missing: int) -> int:
        """Admit a sequence: hold the pages that it hits. Of `num_missing` free pages, which all
        groups together still take, return how many are taken now, or not needed after all.
        """
        return 0

    def extend(self, seq: Sequence, num_tokens: int) -> None:
        """Take the pages that `num_missing` counted and `begin` left. They are free."""

    def make_room(self, seq: Sequence, num_pages: int) -> None:
        """Free pages that nobody needs, until `num_pages` are free for `seq`."""

    @property
    def num_spare(self) -> int:
        """Pages in use that the group gives up as soon as a sequence needs pages."""
        return 0

    # A sequence's life:

    def publish(self, seq: Sequence, first: int, nodes: Seq[Node], num_written: int) -> None:
        """Cache what the first `num_written` tokens have filled, and free what is read no more.
        `nodes` are of the blocks from `first` on, which have just been published.
        """

    def publish_loaded(self, seq: Sequence, index: int, node: Node) -> None:
        """Cache an entry that a load has filled, at a node that was cached before."""

    def trim(self, seq: Sequence, num_blocks: int) -> None:
        """Free the pages of the blocks after a sequence's first `num_blocks`."""

    def free(self, seq: Sequence, distrusted: Seq[Node] | None) -> None:
        """Free all pages of a sequence. What is cached stays in the cache until it is evicted,
        except what no other sequence uses at `distrusted` nodes: there its KV may be wrong.
        """

    def forget(self, node: Node, *, evicted: bool) -> None:
        """Forget the group's entry at a node that leaves the trie. See `trie.Follower`."""

    def pages_of(self, seq: Sequence, index: int) -> list[int]:
        """Return the pages that hold a sequence's entry at a block index."""
        return []

    def kept_pages(self, node: Node) -> Seq[int]:
        """Return the pages of the entry that comes with a cached block; none: there is none."""
        return ()

    # A step:

    def begin_step(self) -> None:
        """Prepare for a step, before it takes pages."""

    def take_pages(self) -> list[int]:
        """Return a page for each of the group's block tables. They are free."""
        return [self.pool.take() for _ in range(self.num_tables)]

    def row_length(self, seq: Sequence, most: int) -> int:
        """Return how many of a prompt's next `most` tokens a row computes, at least 1."""
        return most

    def fill_step(self, step: StepPages) -> None:
        """Add the group's part of a step's message."""

    def end_copies(self, copies: Seq[PageCopy]) -> None:
        """Handle the success of a step with these copies."""

    def undo_copies(self, copies: Seq[PageCopy]) -> None:
        """Handle the failure of a step with these copies, which it may not have made."""


class BidirectionalGroup(KVCacheGroup):
    """Keeps tokens that see each other in one step: a picture's, or a prompt's. It owns no pages:
    those are `FullGroup`'s.

    For prompts the prefix cache must be off, because a token's keys depend on the tokens after it.
    A picture's tokens may be hit, because `Sequence.inputs` names all of it.

    Args:
        most: tokens that see each other. A step's last row may have so many, whatever the budget.
        of_prompts: whether a prompt's tokens all see each other, or only those of a span of inputs.
    """

    suffix = b"whole"  # of no entry
    num_tables = 0
    grows = False

    def __init__(self, most: int, *, of_prompts: bool = True) -> None:
        self.max_extra_tokens = most - 1
        self._of_prompts = of_prompts

    def row_length(self, seq: Sequence, most: int) -> int:
        if self._of_prompts:
            return seq.num_tokens - seq.num_computed_tokens
        end = seq.num_computed_tokens + most
        stops = [span.end for span in seq.inputs if span.start < end]
        return max(end, *stops) - seq.num_computed_tokens if stops else most
