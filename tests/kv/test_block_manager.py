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
    max_examples=examples(300), stateful_step_count=50, deadline=None, derandomize=True
)
TestBlockManager = BlockManagerMachine.TestCase


@pytest.mark.parametrize("num_hashes", [1, 2])
def test_hash_collision_is_never_a_hit(monkeypatch: pytest.MonkeyPatch, num_hashes: int) -> None:
    """Symptom: a crafted prompt reads the KV of someone else's prefix."""
    monkeypatch.setattr("nanovllm.kv.trie.xxh3_128_digest", few_hashes(num_hashes))
    manager = BlockManager(64, 2)
    kv: dict[int, list[int]] = {}
    prompts = [[a, b, c, d, 9] for a in (1, 2) for b in (1, 2) for c in (1, 2) for d in (1, 2)]
    for prompt in prompts:
        num_found = 0
        for i, block_id in enumerate(pages_of(manager.match_prefix(make_seq(prompt)))):
            assert kv[block_id] == prompt[: 2 * i + 2]
            num_found += 1
        seq = publish_all(manager, prompt)
        for i, block_id in enumerate(seq.kv.block_table[num_found:], start=num_found):
            kv[block_id] = prompt[: 2 * i + 2]
        manager.free(seq)
        check_blocks(manager, [])
    assert num_hits(manager, prompts[0]) == 2  # published first, so its keys do hit


def test_collision_breaks_the_chain_below_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Symptom: the second block of a prompt is found under the first block of another."""
    monkeypatch.setattr("nanovllm.kv.trie.xxh3_128_digest", few_hashes(1))
    manager = BlockManager(16, 2)
    publish_all(manager, [1, 2, 3])
    publish_all(manager, [4, 5, 6, 7, 8])  # its first block collides, so its second has no parent
    assert num_hits(manager, [1, 2, 6, 7, 8]) == 1
    assert num_hits(manager, [4, 5, 6, 7, 8]) == 0


def test_same_tokens_under_another_prefix_do_not_match() -> None:
    """Symptom: a block matches by its own tokens, whatever comes before them."""
    manager = BlockManager(16, 2)
    publish_all(manager, [1, 2, 3, 4, 5])
    assert num_hits(manager, [3, 4, 5]) == 0
    assert num_hits(manager, [6, 7, 3, 4, 5]) == 0
    assert num_hits(manager, [1, 2, 3, 4, 5]) == 2


def test_salts_share_no_blocks() -> None:
    """Symptom: the time of a first token tells whether someone else sent the same prompt."""
    manager = BlockManager(16, 2)
    for num_cached, salt in enumerate([None, "a", "b", "0"]):
        assert num_hits(manager, [1, 2, 3, 4, 5], salt) == 0
        manager.free(publish_all(manager, [1, 2, 3, 4, 5], salt))
        assert num_hits(manager, [1, 2, 3, 4, 5], salt) == 2
        assert len(manager.trie.nodes) == 2 * num_cached + 2
    check_blocks(manager, [])
    assert manager.reset_prefix_cache()
    assert num_hits(manager, [1, 2, 3, 4, 5], "a") == 0


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


@pytest.mark.parametrize("block_size", [1, 2, 4])
def test_fully_cached_exact_multiple_leaves_a_token_to_compute(block_size: int) -> None:
    """Symptom: a cached prompt of a whole number of blocks has no hidden state to sample from."""
    manager = BlockManager(32, block_size)
    prompt = list(range(4 * block_size))
    publish_all(manager, prompt)
    assert num_hits(manager, prompt) == 3
    assert num_hits(manager, [*prompt, 99]) == 4


def test_block_is_not_matched_before_it_is_published() -> None:
    """Symptom: a prefix hits a block whose KV is not written yet."""
    manager = BlockManager(16, 2)
    first = make_seq([1, 2, 3, 4, 5])
    assert admit(manager, first) is not None
    assert num_hits(manager, first.token_ids) == 0
    manager.publish(first, 3)  # half of the second block is written
    assert num_hits(manager, first.token_ids) == 1
    manager.publish(first, 4)
    assert num_hits(manager, first.token_ids) == 2


def test_two_writers_of_one_prefix_share_what_comes_after() -> None:
    """Symptom: after two identical prompts in one step, their prefix does not hit."""
    manager = BlockManager(16, 2)
    twins = [make_seq([1, 2, 3, 4, 5]) for _ in range(2)]
    for twin in twins:
        assert admit(manager, twin) is not None
    assert not set(twins[0].kv.block_table) & set(twins[1].kv.block_table)
    manager.publish(twins[0], 2)
    manager.publish(twins[1], 4)  # its second block becomes a child of the first twin's block
    assert pages_of(manager.match_prefix(make_seq([1, 2, 3, 4, 5]))) == [
        twins[0].kv.block_table[0],
        twins[1].kv.block_table[1],
    ]
    check_blocks(manager, twins)


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


def test_reused_block_does_not_inherit_the_old_blocks_children() -> None:
    """Symptom: a reused block keeps its old id, so children of its old prefix still match."""
    manager = BlockManager(4, 1)
    twins = [make_seq([1, 2]), make_seq([1, 2])]
    for twin in twins:
        assert admit(manager, twin) is not None
    manager.publish(twins[0], 1)
    manager.publish(twins[1], 2)  # its second block is a child of the first twin's first block
    (first, _) = twins[0].kv.block_table
    manager.free(twins[0])
    taker = make_seq([8, 9])
    assert admit(manager, taker) is not None
    assert first in taker.kv.block_table
    manager.publish(taker, 2)
    assert num_hits(manager, [8, 2, 0]) == 1
    assert num_hits(manager, [8, 9, 2, 0]) == 2
    check_blocks(manager, [twins[1], taker])


def test_evicted_sequence_is_published_again_from_the_root() -> None:
    """Symptom: a resumed sequence publishes its first block as a child of its old last block."""
    manager = BlockManager(2, 1)
    seq = publish_all(manager, [1, 2])
    manager.free(seq)
    manager.free(publish_all(manager, [8, 9]))
    assert admit(manager, seq) is not None
    manager.publish(seq, 2)
    assert num_hits(manager, [1, 2, 0]) == 2


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


def test_use_makes_a_prefix_recent_again() -> None:
    """Symptom: eviction follows the time of publication instead of the last use."""
    manager = BlockManager(4, 1)
    sequences = [publish_all(manager, tokens) for tokens in ([1, 2], [3, 4])]
    for seq in sequences:
        manager.free(seq)
    again = make_seq([1, 2, 0])
    assert manager.allocate_blocks(again, 2, manager.match_prefix(again)) is not None
    manager.free(again)
    assert manager.allocate_blocks(make_seq([100]), 2) is not None
    assert (num_hits(manager, [1, 2, 0]), num_hits(manager, [3, 4, 0])) == (2, 0)


def test_block_in_use_is_never_evicted() -> None:
    """Symptom: with few free blocks, a running sequence loses a block that it shares."""
    manager = BlockManager(4, 1)
    first = publish_all(manager, [1, 2, 3])
    second = make_seq([1, 2, 9])
    assert admit(manager, second) is not None
    assert manager.num_free_blocks == 0
    tail = first.kv.block_table[2]
    manager.free(first)
    assert manager.allocate_blocks(make_seq([7, 8]), 2) is None
    taker = make_seq([7])
    assert manager.allocate_blocks(taker, 1) == [tail]
    assert num_hits(manager, [1, 2, 0]) == 2
    check_blocks(manager, [second, taker])


def test_allocation_is_all_or_nothing() -> None:
    """Symptom: a request that does not fit keeps some blocks, or its hits leave the free list."""
    manager = BlockManager(4, 1)
    manager.free(publish_all(manager, [1, 2]))
    resident = publish_all(manager, [8])
    big = make_seq([1, 2, 3, 4, 5])
    hit = manager.match_prefix(big)
    assert hit.num_blocks == 2
    before = snapshot(manager, big)
    assert manager.allocate_blocks(big, 5, hit) is None
    assert manager.allocate_blocks(resident, 5) is None
    assert snapshot(manager, big) == before
    assert manager.match_prefix(big) == hit
    assert len(resident.kv.block_table) == 1
    check_blocks(manager, [resident])


def test_hits_on_free_blocks_count_against_the_free_blocks() -> None:
    """Symptom: a hit on a free block is not counted, and the free list becomes empty too early."""
    manager = BlockManager(3, 1)
    manager.free(publish_all(manager, [1, 2]))
    seq = make_seq([1, 2, 3, 4])
    assert admit(manager, seq) is None  # 2 hits and 2 new blocks, of 3 free
    del seq.token_ids[3:]
    assert admit(manager, seq) is not None


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The inputs of all hashes during the test."""
    inputs: list[bytes] = []

    def counting(data: bytes) -> bytes:
        inputs.append(data)
        return xxh3_128_digest(data)

    monkeypatch.setattr("nanovllm.kv.trie.xxh3_128_digest", counting)
    return inputs


def test_blocked_request_does_not_rehash(hashed: list[bytes]) -> None:
    """Symptom: a long prompt at the head of the queue is hashed again in every step."""
    manager = BlockManager(2, 2)
    manager.free(publish_all(manager, [0, 1, 2]))
    hashed.clear()
    blocked = make_seq(list(range(20)))
    for _ in range(50):
        assert admit(manager, blocked) is None
    assert len(hashed) == 1 + 9  # the root and ten full blocks; the last is never matched


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


def test_blocks_for_rounds_up() -> None:
    """Symptom: one block too few at an exact multiple, or one too many."""
    manager = BlockManager(1, 4)
    assert [manager.blocks_for(n) for n in (0, 1, 4, 5, 8)] == [0, 1, 1, 2, 2]
