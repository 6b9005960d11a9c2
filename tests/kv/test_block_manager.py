"""The block manager: a sequence reads only blocks that hold its own prefix, and no block is lost.

The least recently used block is evicted first.
"""

from collections.abc import Callable
from itertools import count

import pytest
from hypothesis import (
    settings,
    strategies as st,
)
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)
from xxhash import xxh3_128_digest

from nanovllm.core.messages import InputSpan
from nanovllm.core.sequence import Sequence
from nanovllm.kv.block_manager import BlockManager
from nanovllm.kv.trie import Hit
from nanovllm.options.sampling_params import SamplingParams
from nanovllm.testing.invariants import check_blocks
from tests.every_case import examples

SEQ_IDS = count()
TEXTS = ([0, 1, 0, 0, 1, 1, 0, 1, 0, 0, 1, 0], [0, 1, 0, 0, 0, 1, 1, 1, 0, 1, 0, 0])
TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=4)
PROMPT = st.builds(
    lambda text, length, tail: text[:length] + tail,
    st.sampled_from(TEXTS),
    st.integers(0, 10),
    TOKENS,
)
INDEX = st.integers(0, 7)
SALT = st.sampled_from([None, None, "salt", "other salt"])
Prefix = tuple[str | int | None, ...]


def make_seq(token_ids: list[int], salt: str | None = None) -> Sequence:
    return Sequence(next(SEQ_IDS), token_ids, SamplingParams(), cache_salt=salt)


def few_hashes(num_hashes: int) -> Callable[[bytes], bytes]:
    """Return a hash function that has only `num_hashes` values."""
    return lambda data: bytes([xxh3_128_digest(data)[0] % num_hashes])


def prefix(seq: Sequence, num_tokens: int) -> Prefix:
    """Return what makes two prefixes equal: the salt and the first tokens of `seq`."""
    return (seq.cache_salt, *seq.token_ids[:num_tokens])


def admit(manager: BlockManager, seq: Sequence) -> list[int] | None:
    """Allocate blocks for all tokens of `seq`, after matching its prefix."""
    return manager.allocate_blocks(seq, len(seq.token_ids), manager.match_prefix(seq))


def pages_of(hit: Hit) -> list[int]:
    """Return the pages that a sequence which begins with `hit` shares."""
    return [node.page for node in hit.nodes]


def publish_all(manager: BlockManager, token_ids: list[int], salt: str | None = None) -> Sequence:
    """Admit a sequence and publish all its full blocks, as after a step that computed it."""
    seq = make_seq(token_ids, salt)
    assert admit(manager, seq) is not None
    manager.publish(seq, len(token_ids))
    return seq


def num_hits(manager: BlockManager, token_ids: list[int], salt: str | None = None) -> int:
    return manager.match_prefix(make_seq(token_ids, salt)).num_blocks


def snapshot(manager: BlockManager, seq: Sequence) -> list[object]:
    """Return everything that an allocation may change."""
    blocks = [(block.ref_count, block.entry) for block in manager.blocks]
    table = list(seq.kv.block_table)
    return [manager.num_free_blocks, blocks, table, seq.kv.num_published_blocks, seq.kv.parent_uid]


class Owner:
    """A sequence that owns blocks, and what the model of the test records about it."""

    def __init__(self, seq: Sequence, num_written: int, parent: int) -> None:
        self.seq = seq
        self.num_written = num_written  # tokens whose KV the test has written
        self.num_published = num_written  # in tokens
        self.parent = parent  # number of the model's entry that is the next block's parent


class BlockManagerMachine(RuleBasedStateMachine):
    """Random admissions, writes, publications and releases against two models.

    `kv` is the memory: block -> the whole prefix written in it. `entries` says what must hit: it
    is keyed by (number of the parent entry, the whole prefix), so it needs no hash.
    """

    @initialize(
        num_blocks=st.integers(2, 16),
        block_size=st.integers(1, 4),
        caching=st.sampled_from([True, True, True, False]),
        num_hashes=st.sampled_from([None, None, None, 2, 1]),
    )
    def start(
        self, num_blocks: int, block_size: int, caching: bool, num_hashes: int | None
    ) -> None:
        self.manager = BlockManager(num_blocks, block_size, enable_prefix_caching=caching)
        self.caching = caching
        self.collides = num_hashes is not None
        if num_hashes is not None:
            self.manager.trie.digest = few_hashes(num_hashes)
        self.owners: list[Owner] = []
        self.waiting: list[Sequence] = []
        self.kv: dict[int, Prefix] = {}
        self.entries: dict[tuple[int, Prefix], tuple[int, int]] = {}  # (number, block)
        self.entry_numbers = count(1)

    def teardown(self) -> None:
        for owner in self.owners:
            self.manager.free(owner.seq)
        check_blocks(self.manager, [])
        assert self.manager.num_free_blocks == len(self.manager.blocks)

    @rule(prompt=PROMPT, salt=SALT, num_copies=st.sampled_from([1, 1, 2]))
    def arrive(self, prompt: list[int], salt: str | None, num_copies: int) -> None:
        for _ in range(num_copies):
            self.waiting.append(make_seq(prompt, salt))
            self.admit(-1)

    @precondition(lambda self: self.waiting)
    @rule(index=INDEX)
    def admit(self, index: int) -> None:
        seq = self.waiting[index % len(self.waiting)]
        hit = self.manager.match_prefix(seq)
        hits = pages_of(hit)
        parent = self.check_hits(seq, hits)
        before = snapshot(self.manager, seq)
        num_revived = sum(self.manager.blocks[block_id].ref_count == 0 for block_id in hits)
        num_new = self.manager.blocks_for(len(seq.token_ids)) - len(hits)
        fits = num_new + num_revived <= self.manager.num_free_blocks
        appended = self.manager.allocate_blocks(seq, len(seq.token_ids), hit)
        assert (appended is not None) == fits
        if appended is None:
            assert snapshot(self.manager, seq) == before
            return
        assert appended[: len(hits)] == hits
        assert len(appended) == len(hits) + num_new
        self.evict(appended[len(hits) :])
        self.waiting.remove(seq)
        self.owners.append(Owner(seq, len(hits) * self.manager.block_size, parent))

    @precondition(lambda self: self.owners)
    @rule(index=INDEX, more=TOKENS)
    def extend(self, index: int, more: list[int]) -> None:
        seq = self.owners[index % len(self.owners)].seq
        seq.token_ids += more
        before = snapshot(self.manager, seq)
        appended = self.manager.allocate_blocks(seq, len(seq.token_ids))
        if appended is None:
            assert snapshot(self.manager, seq) == before
        else:
            assert seq.kv.block_table == [*before[2], *appended]
            assert len(seq.kv.block_table) == self.manager.blocks_for(len(seq.token_ids))
            self.evict(appended)

    @precondition(lambda self: self.owners)
    @rule(index=INDEX, num_tokens=st.integers(1, 8))
    def write(self, index: int, num_tokens: int) -> None:
        owner = self.owners[index % len(self.owners)]
        seq, block_size = owner.seq, self.manager.block_size
        capacity = min(len(seq.token_ids), len(seq.kv.block_table) * block_size)
        end = min(owner.num_written + num_tokens, capacity)
        for position in range(owner.num_written, end):
            block_id = seq.kv.block_table[position // block_size]
            assert self.manager.blocks[block_id].ref_count == 1, "a shared block is written"
            self.kv[block_id] = prefix(seq, position + 1)
        owner.num_written = end

    @precondition(lambda self: self.owners)
    @rule(index=INDEX, num_held_back=st.integers(0, 3))
    def publish(self, index: int, num_held_back: int) -> None:
        owner = self.owners[index % len(self.owners)]
        seq, block_size = owner.seq, self.manager.block_size
        num_tokens = max(0, owner.num_written - num_held_back)
        self.manager.publish(seq, num_tokens)
        while self.caching and owner.num_published + block_size <= num_tokens:
            owned = seq.kv.block_table[owner.num_published // block_size]
            owner.num_published += block_size
            key = (owner.parent, prefix(seq, owner.num_published))
            if key not in self.entries:
                self.entries[key] = (next(self.entry_numbers), owned)
            owner.parent = self.entries[key][0]

    @precondition(lambda self: self.owners)
    @rule(index=INDEX)
    def write_and_publish_all(self, index: int) -> None:
        self.write(index, 100)
        self.publish(index, 0)

    @precondition(lambda self: self.owners)
    @rule(index=INDEX, num_guessed=st.integers(0, 9))
    def guess_and_trim(self, index: int, num_guessed: int) -> None:
        """Take blocks for draft tokens, write there, then give back what is not needed."""
        seq = self.owners[index % len(self.owners)].seq
        before = snapshot(self.manager, seq)
        table = list(seq.kv.block_table)
        num_tokens = len(table) * self.manager.block_size
        appended = self.manager.allocate_blocks(seq, num_tokens + num_guessed)
        if appended is not None:
            self.evict(appended)
            for block_id in appended:
                self.kv[block_id] = ()
            self.manager.trim(seq, num_tokens)
        assert seq.kv.block_table == table
        assert self.manager.num_free_blocks == before[0]

    @precondition(lambda self: self.owners)
    @rule(index=INDEX, comes_back=st.booleans())
    def free(self, index: int, comes_back: bool) -> None:
        owner = self.owners.pop(index % len(self.owners))
        self.manager.free(owner.seq)
        if comes_back:
            self.waiting.append(owner.seq)

    @precondition(lambda self: not self.owners)
    @rule()
    def reset(self) -> None:
        assert self.manager.reset_prefix_cache()
        self.entries = {}

    @invariant()
    def blocks_add_up(self) -> None:
        check_blocks(self.manager, (owner.seq for owner in self.owners))
        owned = {block_id for owner in self.owners for block_id in owner.seq.kv.block_table}
        assert self.manager.num_free_blocks == len(self.manager.blocks) - len(owned)

    @invariant()
    def everyone_reads_back_what_is_theirs(self) -> None:
        block_size = self.manager.block_size
        for owner in self.owners:
            for start in range(0, owner.num_written, block_size):
                end = min(start + block_size, owner.num_written)
                block_id = owner.seq.kv.block_table[start // block_size]
                assert self.kv[block_id] == prefix(owner.seq, end)

    def check_hits(self, seq: Sequence, hits: list[int]) -> int:
        """Compare a match with both models; return the number of the last matched entry."""
        block_size = self.manager.block_size
        assert len(hits) * block_size < len(seq.token_ids), "the match leaves no token to compute"
        parent = 0
        for index, block_id in enumerate(hits):
            expected_prefix = prefix(seq, (index + 1) * block_size)
            assert self.kv[block_id] == expected_prefix, "the block holds another prefix"
            if not self.collides:
                parent, expected = self.entries[parent, expected_prefix]
                assert block_id == expected
        longer = (len(hits) + 1) * block_size
        if not self.collides and longer < len(seq.token_ids):
            assert (parent, prefix(seq, longer)) not in self.entries, "a cached block was missed"
        return parent

    def evict(self, block_ids: list[int]) -> None:
        """Remove the model's entries of blocks that were allocated anew."""
        self.entries = {
            key: entry for key, entry in self.entries.items() if entry[1] not in block_ids
        }


BlockManagerMachine.TestCase.settings = settings(
    max_examples=examples(100), stateful_step_count=50, deadline=None, derandomize=True
)
TestBlockManager = BlockManagerMachine.TestCase


def test_a_hit_has_equal_inputs_at_equal_places() -> None:
    """Symptoms: two pictures share KV, or one of them that lies elsewhere, or a part of one."""
    token_ids = [7, 7, 7, 7, 7, 7, 7]
    one, other = (digit * 32 for digit in (b"1", b"2"))
    inputs = [
        (),
        (InputSpan(1, 4, one),),
        (InputSpan(1, 4, other),),
        (InputSpan(2, 4, one),),
        (InputSpan(1, 5, one),),
        (InputSpan(1, 4, one, 1),),
        (InputSpan(1, 2, one), InputSpan(3, 2, one)),
    ]
    found = []
    manager = BlockManager(64, 2)
    for spans in inputs:
        seq = make_seq(token_ids)
        seq.inputs = spans
        assert admit(manager, seq) is not None
        found.append(seq.num_computed_tokens)
        manager.publish(seq, len(token_ids))
    assert found == [0, 0, 0, 2, 4, 0, 2]


def test_salts_without_cached_blocks_are_forgotten() -> None:
    """Symptom: memory grows with each new salt."""
    manager = BlockManager(8, 2)
    for index in range(100):
        manager.free(publish_all(manager, [1, 2, 3, 4, 5], f"salt {index}"))
    roots = {parent for parent, _ in manager.trie.nodes if isinstance(parent, str)}
    assert roots == {"'salt 96'", "'salt 97'", "'salt 98'", "'salt 99'"}
    check_blocks(manager, [])


def test_oldest_block_is_evicted_first_and_a_tail_before_its_prefix() -> None:
    """Symptom: a recently used prefix is evicted before old ones, or its head before its tail."""
    manager = BlockManager(4, 1)
    old, new = [1, 2], [3, 4]
    sequences = [publish_all(manager, tokens) for tokens in (old, new)]
    for seq in sequences:
        manager.free(seq)

    def hits_after_taking(num_blocks: int) -> tuple[int, int]:
        taker = make_seq([100])
        assert manager.allocate_blocks(taker, num_blocks) is not None
        hits = num_hits(manager, [*old, 0]), num_hits(manager, [*new, 0])
        manager.free(taker)  # its unpublished blocks are allocated again before cached ones
        return hits

    assert hits_after_taking(0) == (2, 2)
    assert hits_after_taking(1) == (1, 2)
    assert hits_after_taking(2) == (0, 2)
    assert hits_after_taking(3) == (0, 1)
    assert hits_after_taking(4) == (0, 0)


def test_trimmed_blocks_are_reused_before_cached_ones() -> None:
    """Symptom: draft tokens that are rejected step by step evict the whole prefix cache."""
    manager = BlockManager(5, 1)
    manager.free(publish_all(manager, [1, 2, 3]))
    seq = make_seq([7])
    assert admit(manager, seq) is not None
    for _ in range(3):
        assert manager.allocate_blocks(seq, 2) is not None
        manager.trim(seq, 1)
    assert len(seq.kv.block_table) == 1
    assert num_hits(manager, [1, 2, 3, 0]) == 3
    check_blocks(manager, [seq])


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The inputs of all hashes during the test."""
    inputs: list[bytes] = []

    def counting(data: bytes) -> bytes:
        inputs.append(data)
        return xxh3_128_digest(data)

    monkeypatch.setattr("nanovllm.kv.trie.xxh3_128_digest", counting)
    return inputs


def test_resumed_sequence_does_not_rehash(hashed: list[bytes]) -> None:
    """Symptom: each preemption hashes the whole sequence again."""
    manager = BlockManager(8, 2)
    seq = publish_all(manager, [1, 2, 3, 4, 5, 6])
    manager.free(seq)
    assert len(hashed) == 1 + 3  # the root, too
    assert admit(manager, seq) is not None
    manager.publish(seq, 6)
    assert len(hashed) == 1 + 3


def test_without_prefix_caching_nothing_is_hashed_or_hit(hashed: list[bytes]) -> None:
    """Symptom: matching or publishing ignores the option, or blocks are still hashed."""
    manager = BlockManager(4, 1, enable_prefix_caching=False)
    seq = publish_all(manager, [1, 2, 3])
    assert num_hits(manager, [1, 2, 3]) == 0
    assert all(block.entry is None for block in manager.blocks)
    check_blocks(manager, [seq])
    manager.free(seq)
    assert num_hits(manager, [1, 2, 3]) == 0
    assert hashed == []
    assert manager.num_free_blocks == 4
    check_blocks(manager, [])
