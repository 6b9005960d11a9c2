"""Random runs with pictures: what a row reads is encoded, and nothing waits for ever. No torch."""

import hashlib
from collections import Counter
from typing import Any

from hypothesis import Phase, settings, strategies as st
from hypothesis.stateful import initialize, invariant, rule

from nanovllm.core.messages import InputSpan, Schedule, StepResult
from nanovllm.core.sequence import Sequence
from nanovllm.core.worker_info import EncoderInfo
from nanovllm.features.vision.messages import NAME, EncoderStep, Picture, Pixels
from nanovllm.features.vision.scheduling import EncoderHook, _Encoding
from nanovllm.testing.fake_engine import FakeEngine, FakeWorker
from nanovllm.testing.random_runs import SchedulerMachine
from tests.every_case import examples

INFO = EncoderInfo(
    num_layers=3, hidden_size=1, layer_weights=10, token_weights=30, bytes_per_token=1
)
MOST = 12
"""Bytes of embeddings, and soft tokens of a prompt."""


def picture(number: int, length: int) -> Picture:
    digest = hashlib.sha256(bytes([number, length])).digest()
    views = tuple(Pixels(1, 1, b"", 2 * length) for _ in range(1 + number % 2))
    return Picture(digest, views, length)


class PictureWorker(FakeWorker):
    """Keeps what the scheduler says is encoded, and looks whether rows find what they read."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.sequences: list[Sequence] = []
        self.encoded: dict[bytes, int] = {}
        self.layers_left: dict[bytes, int] = {}
        self.sizes: dict[bytes, int] = {}
        self.num_encoded: Counter[bytes] = Counter()

    def execute(self, schedule: Schedule) -> StepResult | None:
        step: EncoderStep | None = (schedule.extras or {}).get(NAME)
        for digest in () if step is None else step.dropped:
            self.encoded.pop(digest, None)
            self.layers_left.pop(digest, None)
        for part in () if step is None else step.slices:
            if part.picture is not None:
                assert part.digest not in self.encoded, "it is encoded already"
                self.layers_left[part.digest] = INFO.num_layers * len(part.picture.views)
                self.sizes[part.digest] = part.picture.num_tokens
            self.layers_left[part.digest] -= part.num_parts
            assert self.layers_left[part.digest] >= 0
            if not self.layers_left[part.digest]:
                del self.layers_left[part.digest]
                self.encoded[part.digest] = self.sizes[part.digest]
                self.num_encoded[part.digest] += 1
        assert len(self.layers_left) <= 1
        assert sum(self.sizes[each] for each in (*self.encoded, *self.layers_left)) <= MOST
        for row in schedule.rows:
            for span in self.sequences[row.seq_id].inputs:
                if span.start < row.end and row.num_computed_tokens < span.start + span.length:
                    assert span.digest in self.encoded, f"{row} reads what is not encoded"
        return super().execute(schedule)


class PictureEngine(FakeEngine):
    # A sequence that was parked may be admitted when later ones run.
    is_strict = False
    is_fifo = False
    steps_per_token = 40
    worker: PictureWorker

    def __init__(self, **options: Any) -> None:
        self.hook = EncoderHook(INFO, MOST, options["max_num_batched_tokens"])
        super().__init__(hooks=[self.hook], **options)
        self.worker.sequences = self.sequences

    def make_worker(self, *args: Any) -> PictureWorker:
        return PictureWorker(*args)

    def _check_turns(self, *args: Any) -> None:
        """Sequences with pictures come back behind others."""

    def _may_be_empty(self, schedule: Schedule) -> bool:
        return schedule.extras is not None


class PictureMachine(SchedulerMachine):
    engine_class = PictureEngine

    @initialize(
        max_model_len=st.integers(14, 24),
        block_size=st.integers(1, 5),
        num_spare_blocks=st.integers(0, 6),
        max_num_seqs=st.integers(1, 6),
        max_num_batched_tokens=st.integers(1, 30),
        eos_token_ids=st.sampled_from([(), (3,), (3, 4)]),
        prefix_caching=st.sampled_from([True, True, False]),
        queue_depth=st.sampled_from([0, 1, 1, 2]),
        seed=st.integers(0, 2**32),
    )
    def start(self, **options: Any) -> None:  # type: ignore[override]
        super().start(**options)

    @rule(
        lengths=st.lists(st.tuples(st.integers(0, 5), st.integers(1, 5)), min_size=1, max_size=3),
        text=st.lists(st.integers(0, 4), min_size=1, max_size=3),
        max_tokens=st.integers(1, 6),
        copies=st.sampled_from([1, 1, 2]),
    )
    def add_with_pictures(
        self, lengths: list[tuple[int, int]], text: list[int], max_tokens: int, copies: int
    ) -> None:
        """The soft tokens of a picture depend on it: the fake model reads tokens alone."""
        prompt: list[int] = []
        inputs: list[InputSpan] = []
        for number, length in lengths:
            if len(prompt) + length + 2 * len(text) >= self.engine.scheduler.max_model_len:
                break
            prompt += text
            found = picture(number, length)
            inputs.append(InputSpan(len(prompt), length, found.digest, 0, found))
            prompt += [number % 5] * length
        sizes = {span.digest: span.length for span in inputs}
        if not inputs or sum(sizes.values()) > MOST:
            return
        for _ in range(copies):
            scheduler = self.engine.scheduler
            add = scheduler.add
            scheduler.add = lambda seq: None  # type: ignore[method-assign,misc]
            seq = self.engine.add(prompt + text, max_tokens)
            scheduler.add = add  # type: ignore[method-assign]
            seq.inputs = tuple(inputs)
            scheduler.add(seq)

    @rule()
    def reset(self) -> None:
        if self.engine.scheduler.reset_prefix_cache():
            assert not self.engine.hook._cached

    @invariant()
    def check(self) -> None:
        super().check()
        hook = self.engine.hook
        assert hook.num_bytes <= MOST
        pins: Counter[bytes] = Counter()
        for seq, digests in hook._pinned.items():
            assert not seq.is_finished
            assert seq not in hook._parked
            pins.update(digests)
        assert +hook._pins == pins
        assert all(each in hook._cached for each in pins)
        for seq in hook._parked:
            assert not seq.is_finished
            assert not seq.is_queued
            assert seq.table_idx is None


PictureMachine.TestCase.settings = settings(
    max_examples=examples(60),
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    phases=[Phase.generate],
    report_multiple_bugs=False,
)
TestPictures = PictureMachine.TestCase


def test_a_large_picture_shares_steps_with_others() -> None:
    """It takes as many steps as its layers need, and a text that runs loses none."""
    engine = PictureEngine(max_num_batched_tokens=10, max_model_len=24)
    text = engine.add([1, 2], 20, ignore_eos=True)
    engine.step()
    found = picture(0, 10)
    add = engine.scheduler.add
    engine.scheduler.add = lambda seq: None  # type: ignore[method-assign,misc]
    seq = engine.add([0] * 11, 2)
    engine.scheduler.add = add  # type: ignore[method-assign]
    seq.inputs = (InputSpan(0, 10, found.digest, 0, found),)
    engine.scheduler.add(seq)
    steps = 0
    while seq.table_idx is None and not seq.is_finished:
        before = text.num_output_tokens
        engine.step()
        assert text.num_output_tokens == before + 1
        steps += 1
    # A layer of 20 patches costs 20 * (10 + 2 * 20) / 30 tokens, more than a step has.
    assert steps == INFO.num_layers + 1


def test_text_pays_nothing() -> None:
    """Steps without pictures carry nothing of them."""
    engine = PictureEngine(max_num_batched_tokens=10, max_model_len=24)
    engine.add([1, 2, 3], 6)
    schedules = []
    fill = engine.hook.fill_step
    engine.hook.fill_step = lambda given: schedules.append(fill(given)) or schedules[-1]  # type: ignore[method-assign,func-returns-value]
    for _ in range(4):
        engine.step()
    assert schedules
    assert all(schedule.extras is None for schedule in schedules)


def test_prices() -> None:
    """Layers whose patches see few others cost less, and a step takes as many as it has room for:
    beside rows for one and a half such steps.
    """
    info = EncoderInfo(4, 8, 100, 1000, 1, local_layers=(1, 2, 3))
    assert info.price(10, 0) == 10 * (100 + 2 * 10 * 8) / 1000
    assert info.price(10, 3) == 1.0
    hook = EncoderHook(info, 100, budget=1000)
    engine = FakeEngine(hooks=[hook], max_num_batched_tokens=1000, max_model_len=24)
    views = tuple(Pixels(1, 1, b"", 100) for _ in range(3))  # 170 + 3 * 10 tokens each
    hook._current = _Encoding(Picture(b"digest", views, 1), 12)
    engine.add([1, 2], 20, ignore_eos=True)
    taken = []
    while hook._current is not None:
        schedule = engine.scheduler.schedule()
        assert schedule is not None
        step: EncoderStep = (schedule.extras or {})[NAME]
        taken.append([part.num_parts for part in step.slices])
        engine.scheduler.update(schedule, engine.worker.execute(schedule))
    # Beside a row 24 tokens: layer 0 costs more than that, but a step has at least one.
    assert taken == [[1], [2], [1], [1], [2], [1], [1], [2], [1]]
