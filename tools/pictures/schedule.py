"""schedule.svg: the steps of three sequences, from a real Scheduler with tiny limits.

The example is that of docs/scheduler.md.
"""

import dataclasses

from nanovllm.core.messages import Row, StepResult
from nanovllm.core.sequence import Sequence
from nanovllm.kv.block_manager import BlockManager
from nanovllm.options.sampling_params import SamplingParams
from nanovllm.scheduler.scheduler import Scheduler
from tools.svg import Drawing

NUM_BLOCKS, BLOCK_SIZE, TOKEN_LIMIT, MAX_NUM_SEQS = 8, 4, 8, 3
ARRIVALS = {0: "AB", 2: "C"}
"""For each step's number, the sequences that arrive before it."""
NUM_STEPS = 8
WIDTH, HEIGHT = 1016, 494
LEFT, TOP, COLUMN, LANE, TOKEN = 158, 130, 106, 82, 9
"""Pixels: the first step's left edge, the first sequence's top, a step, a sequence and a token."""
TOKENS_TOP = TOP + 3 * LANE
BLOCKS_TOP = TOKENS_TOP + 44
PREFILL, DECODE, CACHED = "blue", "orange", "green"


@dataclasses.dataclass(frozen=True)
class Step:
    """What one step did to the sequences, by their names."""

    rows: dict[str, Row]
    hits: dict[str, int]
    """For each admitted sequence, its tokens found in the prefix cache."""
    preempted: set[str]
    waiting: set[str]
    resumed: set[str]
    finished: set[str]
    owners: list[str]
    """For each KV block: the names of the sequences that use it."""
    num_tokens: int


def make_sequences() -> dict[str, Sequence]:
    """Return the sequences. C begins with A's prompt."""
    a = Sequence(0, [10, 11, 12, 13, 14, 15], SamplingParams(max_tokens=5))
    b = Sequence(1, list(range(20, 33)), SamplingParams(max_tokens=5))
    c = Sequence(2, list(range(10, 20)), SamplingParams(max_tokens=3))
    return {"A": a, "B": b, "C": c}


def run(sequences: dict[str, Sequence]) -> list[Step]:
    """Return the steps. A constant stands in for the model."""
    pool = BlockManager(NUM_BLOCKS, BLOCK_SIZE)
    scheduler = Scheduler(
        pool,
        max_num_seqs=MAX_NUM_SEQS,
        max_num_batched_tokens=TOKEN_LIMIT,
        max_model_len=NUM_BLOCKS * BLOCK_SIZE,
    )
    arrived: dict[str, Sequence] = {}
    steps: list[Step] = []
    for number in range(NUM_STEPS):
        for name in ARRIVALS.get(number, ""):
            arrived[name] = sequences[name]
            scheduler.add(sequences[name])
        unfinished = {name for name, seq in arrived.items() if not seq.is_finished}
        held = {name for name in unfinished if arrived[name].table_idx is not None}
        schedule = scheduler.schedule()
        assert schedule is not None
        names = {seq.seq_id: name for name, seq in arrived.items()}
        rows = {names[row.seq_id]: row for row in schedule.rows}
        owners = [
            "".join(name for name, seq in arrived.items() if block_id in seq.kv.block_table)
            for block_id in range(NUM_BLOCKS)
        ]
        tokens = [[100] if row.samples else [] for row in schedule.rows]
        scheduler.update(schedule, StepResult(schedule.step_id, tokens))
        step = Step(
            rows=rows,
            hits={name: rows[name].num_computed_tokens for name in rows if name not in held},
            preempted={name for name in held if arrived[name].table_idx is None} - rows.keys(),
            waiting=unfinished - held - rows.keys(),
            resumed={name for name in rows.keys() - held if any(name in s.rows for s in steps)},
            finished={name for name in unfinished if arrived[name].is_finished},
            owners=owners,
            num_tokens=schedule.num_tokens,
        )
        steps.append(step)
    return steps


def draw() -> str:
    """Return the picture."""
    sequences = make_sequences()
    steps = run(sequences)
    drawing = Drawing(
        WIDTH,
        HEIGHT,
        "A schedule of three sequences over eight steps",
        "Prompts are computed in chunks beside decoding sequences. Sequence C finds its first "
        "block in the prefix cache, is preempted for A in step 3 and resumes in step 5.",
    )
    drawing.text(18, 32, "A schedule, step by step", size=17, bold=True)
    drawing.text(WIDTH - 18, 32, "numbers are token positions", "muted", size=12, anchor="end")
    _draw_legend(drawing)
    for number in range(NUM_STEPS):
        x = LEFT + number * COLUMN
        if number % 2 == 0:
            drawing.rect(x, 84, COLUMN, HEIGHT - 100, "panel", radius=6)
        drawing.text(x + COLUMN / 2, 104, f"step {number}", size=12, anchor="middle", bold=True)
    for lane, (name, seq) in enumerate(sequences.items()):
        y = TOP + lane * LANE
        drawing.line([(18, y - 14), (WIDTH - 10, y - 14)], "line")
        drawing.text(18, y + 10, f"Sequence {name}", bold=True)
        drawing.text(18, y + 28, f"{seq.num_prompt_tokens} prompt tokens,", "muted", size=12)
        drawing.text(18, y + 43, f"{seq.params.max_tokens} to generate", "muted", size=12)
        for number, step in enumerate(steps):
            _draw_row(drawing, LEFT + number * COLUMN + 6, y, name, seq, step)
    drawing.line([(18, TOKENS_TOP - 14), (WIDTH - 10, TOKENS_TOP - 14)], "line")
    drawing.text(18, TOKENS_TOP + 10, "Tokens in the step", bold=True)
    drawing.text(18, TOKENS_TOP + 25, f"at most {TOKEN_LIMIT}", "muted", size=12)
    drawing.text(18, BLOCKS_TOP + 14, "KV blocks", bold=True)
    drawing.text(
        18, BLOCKS_TOP + 30, f"{NUM_BLOCKS} of {BLOCK_SIZE} tokens, with", "muted", size=12
    )
    drawing.text(18, BLOCKS_TOP + 45, "their sequences", "muted", size=12)
    for number, step in enumerate(steps):
        _draw_pool(drawing, LEFT + number * COLUMN + 6, step)
    return drawing.svg()


def _draw_legend(drawing: Drawing) -> None:
    for x, kind, words in (
        (18, PREFILL, "prompt token computed"),
        (206, DECODE, "generated token computed"),
        (416, CACHED, "token found in the prefix cache"),
        (656, "", "the step gives a new token"),
    ):
        if kind:
            _draw_token(drawing, x, 51, kind)
        else:
            drawing.circle(x + 4, 55.5, 3.5, stroke=DECODE)
        drawing.text(x + 16, 60, words, size=12)


def _draw_row(drawing: Drawing, x: float, y: float, name: str, seq: Sequence, step: Step) -> None:
    """Draw what a step computes for a sequence, or why it computes nothing."""
    if name in step.preempted:
        drawing.text(x, y + 10, "preempted", size=12, bold=True)
        drawing.text(x, y + 28, "loses its blocks,", "muted", size=11)
        drawing.text(x, y + 42, "keeps its tokens", "muted", size=11)
    elif name in step.waiting:
        drawing.line([(x, y + 6), (x + COLUMN - 12, y + 6)], "muted", dashed=True)
        drawing.text(x, y + 28, "waiting", "muted", size=11)
    row = step.rows.get(name)
    if row is None:
        return
    end = row.num_computed_tokens + row.num_scheduled_tokens
    start = row.num_computed_tokens - step.hits.get(name, 0)
    for index, position in enumerate(range(start, end)):
        computed = PREFILL if position < seq.num_prompt_tokens else DECODE
        kind = CACHED if position < row.num_computed_tokens else computed
        _draw_token(drawing, x + index * TOKEN, y + 2, kind)
    if row.samples:
        drawing.circle(x + (end - start) * TOKEN + 5, y + 6.5, 3.5, stroke=DECODE)
    last = f" to {end - 1}" if row.num_scheduled_tokens > 1 else ""
    drawing.text(x, y + 28, f"{row.num_computed_tokens}{last}", size=12, mono=True)
    notes = [f"hit: {count} tokens" for count in [step.hits.get(name, 0)] if count]
    notes += ["resumed"] * (name in step.resumed) + ["finished"] * (name in step.finished)
    for number, note in enumerate(notes):
        drawing.text(x, y + 44 + 14 * number, note, "muted", size=11)


def _draw_token(drawing: Drawing, x: float, y: float, kind: str) -> None:
    fill = f"{kind}-pale" if kind == CACHED else kind
    drawing.rect(x, y, TOKEN - 1, TOKEN, fill, kind if kind == CACHED else None, radius=1)


def _draw_pool(drawing: Drawing, x: float, step: Step) -> None:
    """Draw how many tokens the step computes, and who uses each KV block."""
    for index in range(TOKEN_LIMIT):
        used = index < step.num_tokens
        fill, stroke = ("muted", None) if used else (None, "line")
        drawing.rect(x + index * TOKEN, TOKENS_TOP + 2, TOKEN - 1, TOKEN, fill, stroke, radius=1)
    drawing.text(x, TOKENS_TOP + 25, f"{step.num_tokens}", size=12, mono=True)
    for block_id, owner in enumerate(step.owners):
        left, top = x + block_id % 4 * 23, BLOCKS_TOP + block_id // 4 * 24
        shared = len(owner) > 1
        fill = "paper" if not owner else f"{CACHED}-pale" if shared else "line"
        stroke = CACHED if shared else "muted" if owner else "line"
        drawing.rect(left, top, 21, 21, fill, stroke, radius=3, dashed=not owner)
        drawing.text(left + 10.5, top + 15, owner, size=11, anchor="middle", bold=True)
